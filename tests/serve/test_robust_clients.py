"""Clients that read slowly, not at all, go away, or come in large numbers: nobody else notices."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from atlas.config import ServeConfig
from atlas.serve import routes
from atlas.serve.access import connections
from atlas.serve.reference import openapi
from atlas.serve.service import Service
from tests.serve.serve_harness import ANSWER, RunningServer, Start, behaviour, eventually, free_port

YO = [{"role": "user", "content": "yo"}]
ENDLESS = 2  # a seed of conftest.py
LINGER_RESET = struct.pack("ii", 1, 0)


def request(seed: int, *, path: str = "/v1/chat/completions", close: bool = False, **fields: Any) -> bytes:
    """A whole HTTP request for an answer."""
    body = json.dumps({"messages": YO, "seed": seed, **fields}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + (b"Connection: close\r\n" if close else b"") + b"\r\n" + body


def connect(server: RunningServer, data: bytes, receive_buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(data)
    return connection


def dechunked(data: bytes) -> bytes:
    """The body of a complete chunked answer."""
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    parts = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            assert rest == b"\r\n"
            return b"".join(parts)
        parts.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]


def content(body: bytes) -> tuple[str, str | None]:
    """The text and the finish reason of a stream that has ended as it should."""
    *events, done = body.decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]


def memory(server: RunningServer) -> float:
    """Resident MB of the API process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def seconds_of_an_answer(server: RunningServer) -> float:
    began = time.perf_counter()
    answer = server.http.post("/v1/chat/completions", json={"messages": YO})
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    return time.perf_counter() - began


def aborts(server: RunningServer) -> int:
    return sum(entry["known"] for entry in server.events("abort"))


def test_clients_that_never_read_are_cut_off(start: Start) -> None:
    """Streams and answers in one piece; they cost little memory, nobody else waits for them, and the engine stops."""
    server = start("--write-timeout", "1.5", max_context=400_000).wait_ready()
    seconds_of_an_answer(server)
    before, began = memory(server), time.monotonic()
    stuck = [connect(server, request(ENDLESS, stream=True), 4096) for _ in range(4)]
    stuck.append(connect(server, request(ENDLESS, max_tokens=60_000), 4096))
    eventually(lambda: len(server.events("submit")) >= 6)
    while aborts(server) < 4:
        assert time.monotonic() - began < 20
        assert seconds_of_an_answer(server) < 2
        time.sleep(0.1)
    assert time.monotonic() - began > 1.4
    assert memory(server) - before < 60
    eventually(lambda: b"HTTP" not in _established(server.port), 20)
    for connection in stuck:
        connection.close()
    assert server.health() == 200 and "Traceback" not in server.output.read_text()


def _established(port: int) -> bytes:
    """b"HTTP" while the server has a connection with something unsent to its client (/proc/net/tcp)."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, _, _, queues = line.split()[1:5]
        if local.endswith(f":{port:04X}") and int(queues.split(":")[0], 16) > 0:
            return b"HTTP"
    return b""


def test_a_slow_reader_gets_all_of_its_answer(start: Start) -> None:
    text = "".join(f"{number} " for number in range(6000))
    behaviours = {"1": behaviour(text, group=50)}
    server = start(max_context=200_000, behaviours=behaviours).wait_ready()
    slow = connect(server, request(1, stream=True, close=True), 4096)
    got, times = b"", []
    for turn in range(10**6):
        piece = slow.recv(16384)
        if not piece:
            break
        got += piece
        if turn % 8 == 0:
            times.append(seconds_of_an_answer(server))
    assert content(dechunked(got)) == (text, "stop")
    assert statistics.median(times) < 0.5


@pytest.mark.parametrize("how", ["reset", "close"])
def test_clients_that_go_away_free_their_sequences(start: Start, how: str) -> None:
    behaviours = {"1": behaviour("x", end=None, delay=0.02)}
    server = start(behaviours=behaviours, default=behaviour("late", delay=3600)).wait_ready()
    kinds = [request(1, stream=True), request(1), request(2, stream=True), request(2), request(2, stream=True, n=3)]
    clients = [connect(server, kind) for kind in kinds for _ in range(12)]
    eventually(lambda: len(server.events("submit")) == 12 * 7, 20)
    for connection in clients:
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
        connection.close()
    began = time.monotonic()
    eventually(lambda: aborts(server) == 12 * 7, 10)
    assert time.monotonic() - began < 5
    info = server.http.get("/server_info").json()
    assert info["engine"]["running"] == 0 and server.health() == 200


def _until(connection: socket.socket, end: bytes) -> None:
    """Read an answer that ends so."""
    got = b""
    while not got.endswith(end):
        piece = connection.recv(4096)
        assert piece, got
        got += piece
    assert got.startswith(b"HTTP/1.1 200")


@contextmanager
def _serving(app: ASGIApp) -> Iterator[int]:
    """The port of an application behind our protocol, in a thread."""
    port = free_port()
    config = uvicorn.Config(app, port=port, http=connections.http_protocol(), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield port
    finally:
        server.should_exit = True
        thread.join(5)


def _files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        if hard < needed:
            pytest.skip(f"needs {needed} open files; accepted here: {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def test_2000_idle_connections(start: Start) -> None:
    _files(2500)
    server = start().wait_ready()
    alone = statistics.median(seconds_of_an_answer(server) for _ in range(20))
    before = memory(server)
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    idle = [connect(server, ask) for _ in range(2000)]
    for connection in idle:
        _until(connection, b'{"status":"ok"}')
    each = (memory(server) - before) / len(idle) * 1e3
    print(f"{each:.1f} KB a connection, an answer takes {alone * 1e3:.1f} ms alone")
    assert each < 40, f"{each:.1f} KB a connection"
    beside = statistics.median(seconds_of_an_answer(server) for _ in range(20))
    assert beside < 4 * alone + 0.05
    for connection in idle:  # all are still usable
        connection.sendall(ask)
    for connection in idle:
        _until(connection, b'{"status":"ok"}')
        connection.close()


def test_more_connections_than_files(start: Start) -> None:
    """Those that find no room are turned away; when others end, there is room again."""
    _files(700)
    server = start().wait_ready()
    pid = server.process.pid
    used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 40, used + 40))
    many = []
    for _ in range(200):
        connection = socket.socket()
        connection.settimeout(1)
        connection.connect(("127.0.0.1", server.port))
        many.append(connection)
    time.sleep(0.3)
    for connection in many:
        connection.close()
    eventually(lambda: server.health() == 200, 15)
    assert seconds_of_an_answer(server) < 5


async def _read(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    got = await reader.read()
    writer.close()
    return got


def test_512_streams_lose_and_double_nothing(start: Start) -> None:
    """Every stream has a text of its own, in which no part is like another."""
    _files(1500)
    texts = {seed: "".join(f"{seed:03d}.{number:02d} " for number in range(20)) for seed in range(1, 513)}
    behaviours = {str(seed): behaviour(text, group=1 + seed % 3) for seed, text in texts.items()}
    server = start(behaviours=behaviours).wait_ready()

    async def all_at_once() -> list[bytes]:
        return await asyncio.gather(*(_read(server.port, request(seed, stream=True, close=True)) for seed in texts))

    answers = asyncio.run(all_at_once())
    for text, answer in zip(texts.values(), answers, strict=True):
        assert content(dechunked(answer)) == (text, "stop")


def test_heads_of_requests_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing at all, half a head, half of the second; while an answer that takes longer is left alone."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.4)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(1.0)
        await Response("ok")(scope, receive, send)

    whole, slow = (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"", b"slow"))
    with _serving(app) as port:
        for first, then in ((b"", b""), (b"", whole[:20]), (whole, whole[:20]), (slow, whole[:20])):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                if first:
                    connection.sendall(first)
                    _until(connection, b"ok")
                connection.sendall(then)
                began = time.monotonic()
                assert connection.recv(4096) == b""
                assert 0.3 < time.monotonic() - began < 3


def test_requests_before_the_first_is_answered() -> None:
    """A few are answered in their order; of thousands, none more than had been read is begun."""
    answered = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.3 if scope["path"] == "/slow" else 0)
        answered.append(scope["path"])
        await Response("ok" + scope["path"])(scope, receive, send)

    with _serving(app) as port:
        for more, fits in ((connections.MAX_PIPELINED, True), (connections.MAX_PIPELINED + 1, False), (3000, False)):
            answered.clear()
            heads = [
                b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in [b"slow", *[b"%d" % i for i in range(more)]]
            ]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(b"".join(heads))
                if fits:
                    _until(connection, b"ok/%d" % (more - 1))
                    assert answered == ["/slow", *[f"/{i}" for i in range(more)]]
                else:
                    assert connection.recv(4096) == b""
                    assert answered == []
            if not fits:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                    connection.sendall(heads[1])  # others are served
                    _until(connection, b"ok/0")


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
def test_who_reads_the_documents_holds_up_no_stream(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take long to make, once."""
    handler = next(endpoint.handler for endpoint in routes.ENDPOINTS if endpoint.path == path)
    make = openapi.document

    def slow(*args: Any, **options: Any) -> dict[str, Any]:
        time.sleep(0.4)
        return make(*args, **options)

    monkeypatch.setattr(openapi, "document", slow)
    for cached in (routes._document, routes._page):
        cached.cache_clear()

    async def main() -> float:
        asking = asyncio.ensure_future(handler(Request({"type": "http"}), Service(ServeConfig())))
        longest, before = 0.0, time.monotonic()
        while not asking.done():
            await asyncio.sleep(0.005)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
        assert (await asking).status_code == 200
        return longest

    assert asyncio.run(main()) < 0.3
