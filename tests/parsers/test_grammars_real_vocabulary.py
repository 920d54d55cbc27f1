"""Forced calls in tokens that are words and not bytes: they begin in one part of a call and end in the next."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from atlas.engine.grammar import Compiler, Grammar, compiler_of
from atlas.parsers import TOOL_FORMATS
from atlas.parsers.grammars import tool_grammar
from atlas.tokenizer import Tokenizer
from atlas.weights import open_checkpoint
from tests.parsers.test_grammars import CLOSE, SCHEMAS, read

Flags = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    with open_checkpoint(smollm2_path) as checkpoint:
        return Tokenizer.from_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def leading(tokenizer: Tokenizer) -> Flags:
    """Which tokens lead on: else strings and numbers have no end."""
    tokens = range(tokenizer.vocab_size)
    return np.array([tokenizer.token_bytes(token)[:1] in b'"}],<\n' for token in tokens], np.uint8)


@pytest.fixture(scope="module")
def compiler(smollm2_path: Path) -> Compiler:
    return compiler_of(smollm2_path)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_what_is_let_through_is_calls(tokenizer: Tokenizer, leading: Flags, compiler: Compiler, name: str) -> None:
    grammar = Grammar("lark", tool_grammar(name, SCHEMAS, special=tokenizer.special_tokens, one=False))
    chance = random.Random(name)
    texts: list[str] = []
    while len(texts) < 2:
        if (ids := _write(tokenizer, leading, compiler, grammar, chance)) is not None:
            stream = tokenizer.stream(frozenset(TOOL_FORMATS[name].words))
            texts.append(stream.push(ids) + stream.finish())
    for text in texts:
        assert read(name, text, SCHEMAS), text


def _write(
    tokenizer: Tokenizer, leading: Flags, compiler: Compiler, grammar: Grammar, chance: random.Random
) -> list[int] | None:
    """Random ids that the grammar lets through; None if they came to no end."""
    matcher, ids = compiler.matcher(grammar), list[int]()
    closing = [tokenizer.encode_plain(word) for word in CLOSE]
    for _ in range(400):
        for word in closing:
            if chance.random() < 0.4 and matcher.validate_tokens(word) == len(word):
                matcher.consume_tokens(word)
                ids += word
        if matcher.is_stopped():
            return ids
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[: leading.size]
        if mask[compiler.end]:
            if mask.sum() == 1 or chance.random() < 0.5:
                return ids
            mask[compiler.end] = 0
        leads_on = mask & leading
        allowed = np.flatnonzero(leads_on if leads_on.any() and chance.random() < 0.6 else mask)
        ids.append(int(chance.choice(allowed)))
        assert matcher.consume_token(ids[-1])
    return None
