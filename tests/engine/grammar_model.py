"""A tiny random model with a tokenizer: noise, which only a grammar makes a text."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from atlas.engine.engine import Engine
from atlas.engine.grammar import Compiler, tokenizer_of
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint
from tests import tiny_model

VOCAB = tiny_model.CONFIG["vocab_size"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|eot|>", "<think>", "</think>", "<pad>"]
EOS, EOT, THINK, END_THINK = 2, 3, 4, 5
WORDS = ["true", "false", "null", '":', '",', '"}', '{"', '": "', "}]", "  ", "\n  ", "the", " the", "12", "00"]


def byte_ids(text: str) -> list[int]:
    """One id for each byte of UTF-8."""
    return [len(SPECIAL) + byte for byte in text.encode()]


@functools.cache
def tokenizer() -> Tokenizer:
    """Bytes, a few words of several, and special tokens: fewer than the model has rows for."""
    letters = _alphabet()
    tokens, merges = [*SPECIAL, *letters], []
    for word in WORDS:
        spelled = [letters[byte] for byte in word.encode()]
        for end in range(2, len(spelled) + 1):
            left, right = "".join(spelled[: end - 1]), spelled[end - 1]
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append((left, right))
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert made.get_vocab_size() < VOCAB - 8, "some rows of the logits have no token"
    return made


def _alphabet() -> list[str]:
    """The letter of each byte, as byte-level BPE writes it (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = [], 256
    for byte in range(256):
        letters.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return letters


@functools.cache
def compiler() -> Compiler:
    """One for all tests: what is compiled is kept."""
    return Compiler(lambda: tokenizer_of(tokenizer().to_str(), (EOS,)))


def text_of(tokens: list[int]) -> str:
    """The text of ids. Raises UnicodeDecodeError where they are none."""
    return compiler().tokenizer.decode_bytes([token for token in tokens if token not in (EOS, EOT)]).decode()


def make(model: Path, backend: str = "cpu", ahead: int = 0, decode_rows: int = 0, **options: object) -> Engine:
    """An engine that works so many steps ahead, with phases if `decode_rows`."""
    with open_checkpoint(model) as checkpoint:
        runner = Runner.load(
            checkpoint,
            RunnerOptions(
                backend=backend,
                quant="f32",
                programs="cuda" if decode_rows else "",
                **{"max_seqs": 8, "max_rows": 24, **options},
            ),
        )
    if ahead:
        runner.work_ahead(ahead)
    if decode_rows:
        runner.decode_rows = decode_rows
    return Engine(runner, compiler())
