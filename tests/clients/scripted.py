"""A server of a scripted engine whose template, tool parser and reasoning parser take all that a chat may ask for."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.serve.in_process import template
from tests.serve.serve_harness import ANSWER, RunningServer, behaviour, make_checkpoint


@contextmanager
def scripted_server(folder: Path) -> Generator[RunningServer]:
    """Ready; ended afterwards."""
    model = make_checkpoint(folder / "model", chat_template=template())
    flags = ["--tool-parser", "hermes", "--reasoning-parser", "think"]
    running = RunningServer(folder, {"default": behaviour(ANSWER), "max_context": 4096}, model, *flags)
    try:
        yield running.wait_ready()
    finally:
        running.close()
