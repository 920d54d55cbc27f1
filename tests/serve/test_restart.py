"""An engine that dies, or hangs, under a server that goes on: it is started again, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import pytest
from serve_harness import ANSWER, RunningServer, Start, alive, behaviour, eventually

from atlas.serve.restarts import WINDOW, Restarts

YO = [{"role": "user", "content": "yo"}]
SLOW = 3
FAULT = 9


def script(**fault: Any) -> dict[str, Any]:
    """SLOW goes on for ever; FAULT does what `fault` says."""
    slow = behaviour("slow ", end=None, delay=0.05)
    return {"behaviours": {str(SLOW): slow, str(FAULT): {**slow, **fault}}}


def ask(server: RunningServer, seed: int = 0) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json={"messages": YO, "seed": seed})


class Stream(threading.Thread):
    """A streaming client: the lines it got, and the status."""

    def __init__(self, server: RunningServer, seed: int = SLOW) -> None:
        super().__init__(daemon=True)
        self.url, self.seed = server.url, seed
        self.status = 0
        self.lines: list[str] = []
        self.start()
        eventually(lambda: len(self.lines) > 1)

    def run(self) -> None:
        body = {"messages": YO, "seed": self.seed, "stream": True}
        with httpx.stream("POST", self.url + "/v1/chat/completions", json=body, timeout=20) as response:
            self.status = response.status_code
            self.lines += (line for line in response.iter_lines() if line)

    def error(self) -> dict[str, Any]:
        """The error event that the stream ended with."""
        self.join(10)
        assert not self.is_alive() and self.lines[-1] == "data: [DONE]"
        error: dict[str, Any] = json.loads(self.lines[-2].removeprefix("data: "))["error"]
        return error


def load_from_now_on(server: RunningServer, **changes: Any) -> None:
    """What engines do that are started from now on."""
    path = server.log.with_name("script.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def break_engine(server: RunningServer, how: str) -> None:
    if how == "kill":
        os.kill(server.engine_pid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(server.engine_pid(), signal.SIGSTOP)
    else:
        Stream(server, FAULT)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("kill", "SIGKILL"),
        ("die_after", "SIGKILL"),
        ("garbage_after", "broken protocol"),
        ("stop", "no progress for 0.8 s"),
        ("hang_after", "no progress for 0.8 s"),
    ],
)
def test_a_dead_engine_is_started_again(start: Start, how: str, reason: str) -> None:
    fault = {} if how in ("kill", "stop") else {how: 8}
    flags = ["--engine-timeout", "0.8"] if "progress" in reason else []
    server = start(*flags, **script(**fault)).wait_ready()
    load_from_now_on(server, load_seconds=1.5)
    assert ask(server).status_code == 200
    running, whole = Stream(server), []
    waiting = threading.Thread(target=lambda: whole.append(ask(server, SLOW)), daemon=True)
    waiting.start()
    eventually(lambda: len(server.events("submit")) == 3)
    break_engine(server, how)

    error = running.error()
    assert (running.status, error["code"], error["type"]) == (200, "engine_failed", "server_error")
    waiting.join(5)
    assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (500, "engine_failed")
    assert whole[0].headers["x-should-retry"] == "false"

    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "restarting"), health.text
    eventually(lambda: reason in server.http.get("/health").json().get("reason", ""), 1)
    refused = ask(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_restarting")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert server.http.get("/v1/models").status_code == 503

    eventually(lambda: server.health() == 200, 10)
    assert ask(server).json()["choices"][0]["message"]["content"] == ANSWER
    first, second = server.engine_pids()
    assert not alive(first) and alive(second)
    assert server.leftovers() == []
    assert 'atlas:engine_restarts_total{model_name="tiny"} 1.0' in server.http.get("/metrics").text
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(5) == 0
    assert not alive(second) and server.leftovers() == []
    assert "Traceback" not in server.output.read_text()


def test_every_api_words_the_engines_death_its_own_way(start: Start) -> None:
    """In a stream, whose status has been sent."""
    server = start("--engine-restarts", "9", default=behaviour("slow ", end=None, delay=0.02, die_after=8)).wait_ready()
    fields = {"model": "tiny", "stream": True}
    for path, body, event, last in (
        ("/v1/completions", {"prompt": "yo"}, None, "data: [DONE]"),
        ("/v1/messages", {"messages": YO, "max_tokens": 99}, "event: error", None),
        ("/v1/responses", {"input": "yo"}, "event: response.failed", None),
    ):
        response = server.http.post(path, json={**fields, **body})
        lines = [line for line in response.text.split("\n") if line]
        assert response.status_code == 200, response.text
        if last is not None:
            assert lines.pop() == last
        assert event is None or lines[-2] == event
        told = json.loads(lines[-1].removeprefix("data: "))
        error = told["response"]["error"] if path == "/v1/responses" else told["error"]
        assert "SIGKILL" in error["message"] or "ended unexpectedly" in error["message"]
        assert error["code"] in ("engine_failed", "server_error")  # the second is one of those that OpenAI's types know
        eventually(lambda: server.health() == 200, 10)


def test_a_request_that_gets_nothing_from_an_engine_that_answers(start: Start) -> None:
    """Neither silence nor a dead process: no step is taken although there is work."""
    server = start("--engine-timeout", "0.8", **script(stall_after=5)).wait_ready()
    stalled = Stream(server, FAULT)
    assert "no progress" in stalled.error()["message"]
    eventually(lambda: server.health() == 200, 10)


def test_an_engine_that_is_busy_or_idle_does_not_hang(start: Start) -> None:
    server = start("--engine-timeout", "0.4", "--drain-timeout", "0", **script()).wait_ready()
    running = Stream(server)
    time.sleep(1.0)
    assert running.is_alive() and len(server.engine_pids()) == 1
    server.http.post("/v1/chat/completions", json={"messages": YO, "seed": SLOW, "max_tokens": 3})
    time.sleep(0.6)
    assert len(server.engine_pids()) == 1 and server.health() == 200


def test_a_second_death_ends_the_server(start: Start) -> None:
    server = start(**script(die_after=3)).wait_ready()
    assert ask(server, FAULT).status_code == 500
    eventually(lambda: server.health() == 200, 10)
    assert ask(server, FAULT).status_code == 500
    assert server.health() in (503, None)
    assert server.process.wait(8) == 1
    assert not any(alive(pid) for pid in server.engine_pids()) and server.leftovers() == []


def test_an_engine_that_cannot_be_started_again(start: Start) -> None:
    server = start(**script()).wait_ready()
    load_from_now_on(server, fatal="no memory is left")
    break_engine(server, "kill")
    assert server.process.wait(8) == 1
    assert "no memory is left" in server.output.read_text() and "Traceback" not in server.output.read_text()
    assert server.leftovers() == []


def test_a_signal_while_the_engine_is_started_again(start: Start) -> None:
    server = start(**script()).wait_ready()
    load_from_now_on(server, load_seconds=30)
    break_engine(server, "kill")
    eventually(lambda: len(server.engine_pids()) == 2)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(2.5) == 0
    assert not any(alive(pid) for pid in server.engine_pids()) and server.leftovers() == []


def test_restarts_in_a_window() -> None:
    now = 1000.0
    restarts = Restarts(2, lambda: now)
    assert restarts.take() and restarts.take() and not restarts.take()
    now += WINDOW - 1
    assert restarts.left == 0 and not restarts.take()
    now += 1
    assert restarts.left == 2 and restarts.take()
    assert not Restarts(0).take()
