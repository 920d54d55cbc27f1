"""From the first millisecond to the last: readiness, conflicts, the engine's death, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serve_harness import (
    ANSWER,
    RunningServer,
    Start,
    alive,
    behaviour,
    environment,
    eventually,
    make_checkpoint,
)

YO = [{"role": "user", "content": "yo"}]


def ends(server: RunningServer, within: float) -> int:
    """The exit code, and that nothing is left behind."""
    began = time.monotonic()
    code = server.process.wait(within + 5)
    assert time.monotonic() - began < within, server.output.read_text()
    if server.events("configure"):
        eventually(lambda: not any(alive(pid) for pid in server.engine_pids()), 1)
    assert server.leftovers() == []
    return code


def open_stream(server: RunningServer, **fields: Any) -> Any:
    return server.openai().chat.completions.create(
        **{"model": "tiny", "messages": YO, "seed": 3, "stream": True, **fields}
    )


def raw_events(server: RunningServer, **fields: Any) -> Any:
    body = {"messages": YO, "seed": 3, "stream": True, **fields}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=10) as response:
        yield response.status_code
        yield from (line for line in response.iter_lines() if line)


def test_health_while_loading(start: Start) -> None:
    server = start(stages=["reading weights", "warming up"], load_seconds=1.0)
    seen: list[tuple[int, Any]] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (not seen or seen[-1][0] != 200):
        try:
            response = server.http.get("/health")
            seen.append((response.status_code, response.json()))
        except httpx.TransportError:
            assert not seen  # refused at first, never again
            continue
        if seen[-1][1].get("stage") == "reading weights":
            refused = server.http.post("/v1/chat/completions", json={"messages": YO})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "server_loading"
            # It may have gone on to the next stage in between.
            assert any(stage in refused.json()["error"]["message"] for stage in ("reading weights", "warming up"))
            assert server.http.get("/v1/models").status_code == 503
        time.sleep(0.01)
    stages = [body.get("stage") for status, body in seen if status == 503]
    assert all(body["status"] == "loading" for status, body in seen if status == 503)
    assert "reading weights" in stages and "warming up" in stages
    assert seen[-1] == (200, {"status": "ok"})
    assert all(server.health() == 200 for _ in range(5))


def test_a_port_in_use(start: Start) -> None:
    first = start().wait_ready()
    began = time.monotonic()
    second = start(port=first.port)
    assert second.process.wait(5) == 2
    assert time.monotonic() - began < 2
    assert f"127.0.0.1:{first.port}" in second.output.read_text()
    assert second.events() == []  # no engine was started
    assert first.health() == 200


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "no.such.host.invalid"], ["--host", "no.such.host.invalid"]),
        (["--insecure", "--host", "203.0.113.7"], ["--host: cannot listen", "203.0.113.7:"]),
    ],
)
def test_an_address_that_is_not_ours(start: Start, flags: list[str], words: list[str]) -> None:
    server = start(*flags)
    assert server.process.wait(10) == 2
    for word in words:
        assert word in server.output.read_text()


def test_it_serves_though_nothing_can_be_written(tmp_path: Path) -> None:
    """A full disk behind both streams of output costs their lines only."""
    (tmp_path / "output.txt").symlink_to("/dev/full")
    server = RunningServer(tmp_path, {"default": behaviour("ok")}, make_checkpoint(tmp_path / "model"))
    try:
        eventually(lambda: server.health() == 200 or server.process.poll() is not None, 20)
        assert server.openai().chat.completions.create(model="model", messages=YO).choices
        server.process.terminate()
        assert server.process.wait(5) == 0
    finally:
        server.process.kill()


@pytest.mark.parametrize("name", ["./does-not-exist", "smollm3-136m"])
def test_a_wrong_model(name: str) -> None:
    command = [sys.executable, "-m", "atlas.serve", "--offline", "--port", "0", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment(), check=False)
    assert done.returncode == 1
    assert name in done.stderr and "Traceback" not in done.stderr


def test_a_damaged_checkpoint(start: Start, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "damaged")
    (folder / "tokenizer.json").write_text("{}")
    server = start(model=folder, load_seconds=5.0)
    assert ends(server, 4) == 1
    assert "tokenizer.json" in server.output.read_text()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"fatal": "weights: tensor x is missing"}, "weights: tensor x is missing"),
        ({"exit_on_load": 7}, "exited with code 7"),
    ],
)
def test_an_engine_that_cannot_start(start: Start, script: dict[str, Any], words: str) -> None:
    server = start(**script)
    assert ends(server, 5) == 1
    assert words in server.output.read_text() and "Traceback" not in server.output.read_text()


@pytest.mark.parametrize("fault", ["die_after", "garbage_after", "kill"])
def test_the_engines_death_where_it_is_not_started_again(start: Start, fault: str) -> None:
    behaviours = {"3": behaviour("slow ", end=None, delay=0.05)}
    if fault != "kill":
        behaviours["9"] = behaviour("x", end=None, delay=0.05, **{fault: 8})
    server = start("--engine-restarts", "0", behaviours=behaviours).wait_ready()
    bystander = raw_events(server)
    assert next(bystander) == 200 and next(bystander).startswith("data: ")
    if fault == "kill":
        subprocess.run(["kill", "-9", str(server.engine_pid())], check=True)
    else:
        with pytest.raises(openai.APIError, match="engine"):
            list(open_stream(server, seed=9))
    died = time.monotonic()
    lines = list(bystander)
    assert time.monotonic() - died < 1.5
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "engine_failed"
    response = eventually(lambda: (r := server.http.get("/health")).status_code == 503 and r, 2)
    assert response.json()["status"] == "dead" and response.json()["reason"]
    refused = server.http.post("/v1/chat/completions", json={"messages": YO})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_dead"
    assert ends(server, 5) == 1
    assert "the engine died" in server.output.read_text()


def test_a_body_that_never_ends_does_not_hold_up_the_end(start: Start) -> None:
    server = start("--drain-timeout", "20").wait_ready()
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        headers = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 99"
        head = f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n{{"
        half.sendall(head.encode())
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert ends(server, 4) == 0
    assert "Traceback" not in server.output.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_when_idle(start: Start, number: int) -> None:
    server = start().wait_ready()
    assert server.health() == 200  # leaves a keep-alive connection open
    assert not server.leftovers(), "the socket's folder goes once the engine has connected"
    server.process.send_signal(number)
    assert ends(server, 2) == 0
    assert server.events("shutdown")


@pytest.mark.parametrize("stage", ["load", "deaf"])
def test_a_signal_while_loading(start: Start, stage: str) -> None:
    server = start(load_seconds=30.0, deaf=stage == "deaf")
    eventually(lambda: server.events("configure"), 10)
    server.process.send_signal(signal.SIGTERM)
    assert ends(server, 2) == 0


def test_running_streams_finish(start: Start) -> None:
    server = start("--drain-timeout", "5").wait_ready()
    streams = [raw_events(server, max_tokens=20) for _ in range(4)]
    for one in streams:
        assert next(one) == 200 and next(one)
    idle = httpx.Client(base_url=server.url)
    assert idle.get("/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: idle.get("/health").json()["status"] == "shutting down", 1)
    refused = idle.post("/v1/chat/completions", json={"messages": YO})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_shutting_down"
    for one in streams:
        lines = [json.loads(line.removeprefix("data: ")) for line in list(one)[:-1]]
        assert "".join(line["choices"][0]["delta"].get("content", "") for line in lines) == "slow " * 4
        assert lines[-1]["choices"][0]["finish_reason"] == "length"
    idle.close()
    assert ends(server, 2) == 0


def test_an_answer_in_one_piece_that_does_not_finish(start: Start) -> None:
    server = start("--drain-timeout", "0.5").wait_ready()
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(server.url + "/v1/chat/completions", json={"messages": YO, "seed": 3}, timeout=10))

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: server.events("submit"))
    server.process.send_signal(signal.SIGTERM)
    assert ends(server, 2.5) == 0
    asking.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "server_shutting_down")
    assert int(answers[0].headers["retry-after"]) > 0


@pytest.mark.parametrize("deaf", [False, True])
def test_streams_that_do_not_finish_end_with_an_error_event(start: Start, deaf: bool) -> None:
    server = start("--drain-timeout", "0.5", deaf=deaf).wait_ready()
    streams = [raw_events(server) for _ in range(4)]
    for one in streams:
        assert next(one) == 200 and next(one)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    for one in streams:
        lines = list(one)
        assert lines[-1] == "data: [DONE]"
        assert "shutting down" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
    assert ends(server, 2.5 - (time.monotonic() - began)) == 0


def test_a_second_signal_does_not_wait(start: Start) -> None:
    server = start("--drain-timeout", "60").wait_ready()
    one = raw_events(server)
    assert next(one) == 200 and next(one)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    lines = list(one)
    assert lines[-1] == "data: [DONE]" and "shutting down" in lines[-2]
    assert ends(server, 2) == 0


def test_a_client_that_never_reads_cannot_hold_up_the_shutdown(start: Start) -> None:
    server = start("--drain-timeout", "0.3", max_context=200_000).wait_ready()
    body = json.dumps({"messages": YO, "seed": 2, "stream": True}).encode()
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head.encode() + body)
        eventually(lambda: server.events("submit"))
        time.sleep(0.5)
        answer = server.openai().chat.completions.create(model="tiny", messages=YO)
        assert answer.choices[0].message.content == ANSWER
        server.process.send_signal(signal.SIGTERM)
        assert ends(server, 2.5) == 0
