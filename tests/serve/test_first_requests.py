"""A request of a new kind does not hold up those that run: what all of them need is made while the server starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atlas.config import ServeConfig
from atlas.serve.frontend import Frontend
from atlas.tokenizer import Tokenizer, tokenizer
from tests.serve.in_process import make_model


@pytest.mark.parametrize("prepend", [None, "first", "always"])
def test_nothing_is_left_to_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepend: str | None) -> None:
    model = make_model(tmp_path / "model", special=["<think>", "</think>", "<tool_call>", "</tool_call>"])
    if prepend is not None:
        document = json.loads((model / "tokenizer.json").read_text())
        document["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": prepend}
        (model / "tokenizer.json").write_text(json.dumps(document))
    config = ServeConfig(model=str(model), tool_parser="hermes", reasoning_parser="think")
    known = Frontend.load(model, config).tokenizer

    def late(*_: Any, **__: Any) -> Any:
        raise AssertionError("made when a request waits")

    monkeypatch.setattr(Tokenizer, "_load", late)
    monkeypatch.setattr(tokenizer.json, "loads", late)
    for text in ("a", "a <think> b", "<|eot|>"):
        guarded = known.guard(text)
        known.encode_rendered(f"{guarded}<|eot|>{guarded}")
        known.encode_plain(text)
        known.decode(known.encode(text, add_special_tokens=True), skip_special_tokens=False)
    for index in range(known.vocab_size):
        known.token_bytes(index)
    known.stream()
