"""SentencePiece vocabularies of GGUF files against the algorithm's definition, on random vocabularies and texts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from atlas.errors import CheckpointError
from atlas.tokenizer.gguf import tokenizer_documents

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPACE = "▁"


def vocabulary(rng: np.random.Generator, alphabet: str, joins: int) -> dict[str, Any]:
    """Control tokens, bytes, the alphabet and random joins of what is there already, with distinct scores."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    scores = [0.0] * len(tokens)
    pieces = [SPACE, *alphabet]
    while len(pieces) < joins:
        left, right = rng.choice(len(pieces), 2)
        if (new := pieces[left] + pieces[right]) not in pieces and len(new) <= 6:
            pieces.append(new)
    order = rng.permutation(len(pieces))
    for piece, score in zip(pieces, order, strict=True):
        tokens.append(piece)
        types.append(NORMAL)
        scores.append(-float(score))
    tokens.append("\n\n")
    types.append(USER)
    scores.append(-1000.0)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def encode(metadata: dict[str, Any], text: str) -> list[int]:
    """The definition: of all neighbours join those whose join scores best, the leftmost among equals."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    result = [metadata["tokenizer.ggml.bos_token_id"]]
    for i, part in enumerate(text.split("\n\n")):
        if i:
            result.append(ids["\n\n"])
        if not part:
            continue
        prefix = SPACE if metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
        symbols = list(prefix + part.replace(" ", SPACE))
        while True:
            joins = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
            if not joins:
                break
            at = -max(joins)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            result += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


@pytest.mark.parametrize("prefix", [None, True, False])
def test_ids_and_text(prefix: bool | None) -> None:
    rng = np.random.default_rng()
    alphabet = "abcdeé漢"
    for _ in range(5):
        metadata = vocabulary(rng, alphabet, 60)
        if prefix is not None:
            metadata["tokenizer.ggml.add_space_prefix"] = prefix
        tokenizer = Tokenizer.from_str(tokenizer_documents(metadata, "f")[0])
        for _ in range(40):
            text = "".join(rng.choice([*alphabet, " ", "z", "😀"], int(rng.integers(1, 30))))
            assert tokenizer.encode(text).ids == encode(metadata, text), text
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
        # Where the text around a token of its own begins anew, llama.cpp and tokenizers differ over the prefix.
        if prefix is False:
            assert tokenizer.encode("ab\n\ncd").ids == encode(metadata, "ab\n\ncd")


def test_bos_is_the_default_and_can_be_switched_off() -> None:
    metadata = vocabulary(np.random.default_rng(0), "ab", 8)
    ids = Tokenizer.from_str(tokenizer_documents(metadata, "f")[0]).encode("a").ids
    assert ids[0] == 1
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert Tokenizer.from_str(tokenizer_documents(metadata, "f")[0]).encode("a").ids == ids[1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores differs in length"),
        ({"tokenizer.ggml.scores": "x"}, "tokenizer.ggml.scores differs in length"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; accepted: gpt2 .* or llama"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is None"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_documents({**vocabulary(np.random.default_rng(0), "ab", 8), **change}, "f.gguf")


@pytest.mark.parametrize("score", ["x", None, True, [1.0], float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_named(score: object) -> None:
    metadata = vocabulary(np.random.default_rng(), "ab", 8)
    metadata["tokenizer.ggml.scores"][3] = score
    with pytest.raises(CheckpointError, match=r"f\.gguf: tokenizer\.ggml\.scores\[3\] is .*a finite number"):
        tokenizer_documents(metadata, "f.gguf")
