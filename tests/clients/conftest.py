"""One real server for the whole folder, and its clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from atlas.tokenizer import Tokenizer
from atlas.weights import open_checkpoint
from tests.serve.real_server import RealServer

TEMPLATE = Path(__file__).parents[2] / "docs" / "chat-templates" / "chatml_tools.jinja"
"""SmolLM2's own knows neither tools nor thinking. This one does, and is the same where neither is asked for."""


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RealServer]:
    """A server that no test may damage."""
    flags = ["--chat-template", str(TEMPLATE), "--tool-parser", "hermes", "--reasoning-parser", "think"]
    with RealServer(tmp_path_factory.mktemp("clients"), smollm2_path, *flags).started() as running:
        yield running


@pytest.fixture
def client(server: RealServer) -> openai.OpenAI:
    """The official client, which gives an error back at once."""
    return server.client


@pytest.fixture(scope="package")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    """The model's own, which tests/tokenizer holds against others'."""
    with open_checkpoint(smollm2_path) as checkpoint:
        return Tokenizer.from_checkpoint(checkpoint)
