"""`priority`: whoever may not go in front of others is told so, whatever API the request came through."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.serve.in_process import Server, make_model

YO = [{"role": "user", "content": "yo"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": YO},
    "/v1/completions": {"prompt": "yo"},
    "/v1/responses": {"input": "yo"},
    "/v1/messages": {"messages": YO, "max_tokens": 9},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("priority") / "model")


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(
    ("least", "asked", "used"),
    [
        (None, None, 0),
        (None, 0, 0),
        (None, 7, 7),
        (None, -1, None),
        (None, -(2**63), None),
        (-5, None, 0),
        (-5, -5, -5),
        (-5, -6, None),
        (3, None, 3),
        (3, 0, None),
        (3, 4, 4),
    ],
)
def test_priority(model: Path, path: str, least: int | None, asked: int | None, used: int | None) -> None:
    server = Server(model, **({} if least is None else {"min_priority": least}))
    seed = server.say_text(5, "hi")
    body = {**REQUESTS[path], "seed": seed, **({} if asked is None else {"priority": asked})}
    answer = asyncio.run(server.post(path, **body))
    if used is not None:
        assert answer.status_code == 200, answer.text
        assert server.engine.submitted[-1][1].priority == used
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "priority_not_allowed", "priority")
    assert str(asked) in error["message"] and "--min-priority" in error["message"]
    assert not server.engine.submitted
