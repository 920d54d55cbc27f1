"""What one request may send to the engine, all its sequences together."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atlas.serve import chat_generation, jobs
from atlas.serve.openai import completions
from tests.serve.in_process import Server, make_model

MANY = [*range(250)]
YO = [{"role": "user", "content": "yo"}]
LONG = "x" * 3000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Of a context of 5,000 tokens, four times which is what one request may send."""
    server = Server(make_model(tmp_path / "model"))
    serving = server.service.require()
    ready = msgspec.structs.replace(serving.ready, max_context=5000)
    server.service.serving = msgspec.structs.replace(serving, ready=ready)
    monkeypatch.setattr(jobs, "MAX_SENT", 1000)
    return server


@pytest.mark.parametrize(
    ("path", "body", "fits", "more", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, {"n": 6}, {"n": 7}, "n"),
        ("completions", {"prompt": LONG}, {"n": 6}, {"n": 7}, "n"),
        ("completions", {"prompt": LONG}, {"best_of": 6}, {"best_of": 7}, "n"),
        ("completions", {}, {"prompt": [LONG] * 6}, {"prompt": [LONG] * 7}, "prompt"),
        ("completions", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, MANY), 1)}, {"n": 9}, {"n": 10}, "n"),
        ("completions", {"prompt": "x", "stop_token_ids": MANY}, {"n": 39}, {"n": 40}, "n"),
        ("chat/completions", {"messages": YO, "stop_token_ids": MANY}, {"n": 36}, {"n": 40}, "n"),
    ],
)
def test_all_sequences_together(
    server: Server, path: str, body: dict[str, Any], fits: dict[str, Any], more: dict[str, Any], param: str
) -> None:
    server.engine.answers = _Any()

    async def post(**given: Any) -> Any:
        return await server.post(f"/v1/{path}", **body, **given)

    answer = asyncio.run(post(**fits))
    assert answer.status_code == 200, answer.text
    before = len(server.engine.submitted)
    answer = asyncio.run(post(**more))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "too_much_for_one_request", param), error
    assert "20000 in all" in error["message"] and len(server.engine.submitted) == before


class _Any(dict[int, list[list[int]]]):
    """Answers for every seed."""

    def __missing__(self, seed: int) -> list[list[int]]:
        return [[100, 3]]


@pytest.mark.parametrize(
    ("place", "path", "body"),
    [
        (chat_generation, "chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        (completions, "completions", {"prompt": "x"}),
    ],
)
def test_sequences_are_made_in_a_thread(
    server: Server, place: Any, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is much of a request: each has its fields checked again."""
    server.engine.answers = _Any()
    threads = []

    def seen(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return jobs.make_jobs(*args, **options)

    monkeypatch.setattr(place, "make_jobs", seen)
    answer = asyncio.run(server.post(f"/v1/{path}", **body, unknown="x" * 10_000))
    assert answer.status_code == 200, answer.text
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
