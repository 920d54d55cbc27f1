"""A tiny random model that speaks bytes, and an LLM on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas.llm import LLM
from tests import tiny_model
from tests.serve.serve_harness import make_checkpoint


def make_model(folder: Path, **changes: object) -> Path:
    """Weights of tests/tiny_model.py with the byte tokenizer and the chat template of the server's tests."""
    make_checkpoint(folder)
    return tiny_model.write(folder, eos_token_id=2, **changes)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """Shared by a module's tests; each must leave it without a request."""
    with LLM(model, backend="cpu", quant="f32", max_seqs=8, threads=2) as shared:
        yield shared
        stats = shared.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)
