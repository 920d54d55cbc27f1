"""The tokenizer made from GGUF metadata gives llama.cpp's ids (tests/oracle/make_tokenizer_oracle.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atlas.errors import CheckpointError
from atlas.tokenizer import Tokenizer
from atlas.tokenizer.gguf import PRE_TOKENIZERS, tokenizer_documents
from atlas.weights import TokenizerFiles, open_checkpoint
from atlas.weights.gguf_header import read_header

ORACLE = json.loads((Path(__file__).parents[1] / "oracle" / "smollm2_tokens.json").read_text())
PRES = ("smollm", "default", "gpt-2", "llama-bpe", "qwen2")


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return read_header(smollm2_path).metadata


def build(metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    """A tokenizer from metadata; changes are fields after `tokenizer.ggml.`, None removes one."""
    fields = {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}
    document, config = tokenizer_documents({key: value for key, value in fields.items() if value is not None}, "m.gguf")
    return Tokenizer(TokenizerFiles(document, json.loads(config), None, "m.gguf"), {}, {})


@pytest.mark.parametrize("pre", PRES)
def test_ids_are_those_of_llama_cpp(metadata: dict[str, Any], pre: str) -> None:
    merges = ORACLE["digit_merges"] if pre != "smollm" else []
    tokenizer = build(
        metadata,
        pre=pre,
        tokens=metadata["tokenizer.ggml.tokens"] + [merge.replace(" ", "") for merge in merges],
        token_type=metadata["tokenizer.ggml.token_type"] + [1] * len(merges),
        merges=metadata["tokenizer.ggml.merges"] + merges,
    )
    differ = [
        (text, kind)
        for index, text in enumerate(ORACLE["texts"])
        for kind, ids in (
            ("special", tokenizer.encode(text, add_special_tokens=False)),
            ("plain", tokenizer.encode_plain(text)),
        )
        if ids != ORACLE[pre][kind][index]
    ]
    assert differ == []


def test_oracle_tells_the_rules_apart() -> None:
    assert len(ORACLE["texts"]) >= 150
    rules = [json.dumps(ORACLE[pre]["plain"]) for pre in PRES]
    assert len(set(rules)) == len(PRES)
    assert ORACLE["smollm"]["special"][ORACLE["texts"].index("a  12")] == [81, 256, 33, 34]
    # Every rule of the table is one that llama.cpp was asked about, under this name or an alias.
    assert {PRE_TOKENIZERS[pre].patterns for pre in PRES} == {rule.patterns for rule in PRE_TOKENIZERS.values()}


def test_smollm2_as_a_whole(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(smollm2_path))
    assert tokenizer.encode("a  12", add_special_tokens=True) == [81, 256, 33, 34]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 49152)
    assert tokenizer.special_tokens_map == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template
    for text in ORACLE["texts"]:
        # The vocabulary lacks some bytes; where llama.cpp loses a character, so do we.
        ids = tokenizer.encode_plain(text)
        if b"".join(map(tokenizer.token_bytes, ids)) == text.encode():
            assert tokenizer.decode(ids) == text
            detokenizer = tokenizer.stream()
            assert detokenizer.push(ids) + detokenizer.finish() == text


def test_bos_and_eos_are_added_as_the_metadata_says(metadata: dict[str, Any]) -> None:
    plain = build(metadata).encode("a", add_special_tokens=True)
    assert plain == [81]
    assert build(metadata, add_bos_token=True).encode("a", add_special_tokens=True) == [1, 81]
    both = build(metadata, add_bos_token=True, add_eos_token=True)
    assert both.encode("a", add_special_tokens=True) == [1, 81, 2]
    assert both.encode("a", add_special_tokens=False) == [81]
    # Where the metadata is silent, llama.cpp's rule for the pre-tokeniser holds.
    assert build(metadata, add_bos_token=None).encode("a", add_special_tokens=True) == [81]
    assert build(metadata, add_bos_token=None, pre="llama-bpe").encode("a", add_special_tokens=True)[0] == 1
    with pytest.raises(CheckpointError, match=r"add_bos_token is set but .*bos_token_id is missing"):
        build(metadata, add_bos_token=True, bos_token_id=None)


def test_missing_pre_means_the_default(metadata: dict[str, Any]) -> None:
    tokenizer = build(metadata, pre=None)
    text = "the in  12, 12345 a+b"
    assert tokenizer.encode_plain(text) == build(metadata, pre="default").encode_plain(text)


def test_templates_by_name(metadata: dict[str, Any]) -> None:
    fields = {**metadata, "tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools!"}
    both = build(fields).chat_template
    assert both is not None and "tools!" in both and "plain" in both
    del fields["tokenizer.chat_template"]
    assert build(fields).chat_template is None


TINY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", "<tool>", "Ġ", "<0x0A>", "unused"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 4, 1, 6, 5],
    "tokenizer.ggml.merges": ["a b"],
}


def test_token_types() -> None:
    tokenizer = build(TINY)
    assert tokenizer.encode("<s>ab<tool> a", add_special_tokens=False) == [0, 3, 4, 5, 1]
    # User-defined tokens are text, control tokens are not; byte and unused tokens are never read from text.
    assert tokenizer.encode_plain("ab<tool>") == [3, 4]
    assert 0 not in tokenizer.encode_plain("<s>ab")
    assert 6 not in tokenizer.encode("<0x0A>", add_special_tokens=False)
    assert tokenizer.decode([0, 3, 4]) == "ab<tool>"
    assert tokenizer.eos_token_ids == () and tokenizer.bos_token_id is None and tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "wobble"}, r"tokenizer\.ggml\.pre is 'wobble'; accepted: default, gpt-2.*smollm.*qwen2"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model is 'bert'; accepted: gpt2"),
        ({"model": None}, r"tokenizer\.ggml\.model is None"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is missing or no list of strings"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"merges": ["a b", "b a"]}, r"tokenizer\.ggml\.merges\[1\] is 'b a'"),
        ({"merges": ["ab"]}, r"tokenizer\.ggml\.merges\[0\] is 'ab'"),
        ({"token_type": [1]}, r"tokenizer\.ggml\.token_type differs in length"),
        ({"token_type": ["a"] * 8}, r"tokenizer\.ggml\.token_type\[0\] is 'a'; accepted: a finite number"),
        ({"pre": ["gpt-2"]}, r"tokenizer\.ggml\.pre is \['gpt-2'\]; accepted: default"),
        ({"eos_token_id": True}, r"tokenizer\.ggml\.eos_token_id is True"),
        ({"eos_token_id": 8}, r"tokenizer\.ggml\.eos_token_id is 8; accepted: an id below 8"),
    ],
)
def test_wrong_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf: {message}"):
        build(TINY, **changes)
