"""Servers for the tests: one that most share, and a factory for those that break theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import messages_harness
import pytest
from responses_server import start_reasoner
from serve_harness import ANSWER, RunningServer, Start, behaviour, make_checkpoint

from atlas.engine.sampling import choice_seed

# What the engine does for each seed; see the tests that send it.
BEHAVIOURS = {
    "1": behaviour("abcDEFGHIJklm"),
    # What choices 0, 1 and 2 of a request with seed 60 do.
    **{str(choice_seed(60, i)): behaviour(f"{60 + i} abcDEFGHIJklm") for i in range(3)},
    # Choices of a request with seed 70, none of them as likely as another.
    **{
        str(choice_seed(70, i)): behaviour(f"{70 + i}", logprob=logprob)
        for i, logprob in enumerate([-3.0, -1.0, -2.0, -0.5, -4.0, -0.1])
    },
    "2": behaviour("uvwxyz", end=None),
    "3": behaviour("slow ", end=None, delay=0.05),
    "4": behaviour("broken", error_after=3),
    "5": {"tokens": [*behaviour("ok", end=None)["tokens"], 310, *behaviour("yes")["tokens"]]},
    "6": behaviour("abcDEFGHIJklm", group=5),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "load" in str(config.getoption("markexpr")):
        return
    for item in items:
        if item.get_closest_marker("load"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with `pytest -m load`"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", temperature=0.5, top_k=20)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[RunningServer]:
    """A server that no test may damage."""
    script: dict[str, Any] = {"default": behaviour(ANSWER), "behaviours": BEHAVIOURS}
    server = RunningServer(tmp_path_factory.mktemp("shared"), script, checkpoint)
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="session")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The server that tests of /v1/responses share."""
    server = start_reasoner(tmp_path_factory.mktemp("reasoner"))
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="session")
def messages_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Another one, of a model with tools and reasoning."""
    server = messages_harness.start_server(tmp_path_factory.mktemp("messages"))
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture
def start(tmp_path: Path, checkpoint: Path) -> Iterator[Start]:
    """Start servers of one's own."""
    servers: list[RunningServer] = []

    def begin(*flags: str, model: Path = checkpoint, port: int = 0, **script: Any) -> RunningServer:
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        script = {"default": behaviour(ANSWER), "behaviours": BEHAVIOURS, **script}
        servers.append(RunningServer(folder, script, model, *flags, port=port))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()
