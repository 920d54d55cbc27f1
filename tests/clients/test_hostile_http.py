"""What no client library sends: bytes that are no HTTP, heads and bodies that do not end, what proxies smuggle."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.serve.serve_harness import ANSWER, RunningServer, behaviour, eventually, make_checkpoint

CHAT = json.dumps({"messages": [{"role": "user", "content": "yo"}]}).encode()
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("hostile")
    slow = behaviour("slow ", end=None, delay=0.05)
    running = RunningServer(
        folder, {"default": behaviour(ANSWER), "behaviours": {"3": slow}}, make_checkpoint(folder / "model")
    )
    try:
        yield running.wait_ready()
    finally:
        running.close()


def request(body: bytes = CHAT, *headers: str, method: str = "POST", path: str = PATH, length: Any = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    if length is not False:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def exchange(server: RunningServer, *pieces: bytes, wait: float = 5) -> bytes:
    """All that the server answers until it closes the connection or says nothing for a while."""
    received = b""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(wait)
        try:
            for piece in pieces:
                connection.sendall(piece)
            while data := connection.recv(1 << 16):
                received += data
        except (TimeoutError, ConnectionError):
            pass
    return received


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer, which must be of the API's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer[:300]
    error = json.loads(body)["error"]
    assert error["message"] and error["type"] and error["code"] and "param" in error
    return int(head.split()[1]), error


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 100,  # TLS to a server without
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\xff\xfe\x00 nonsense\r\n\r\n",
        request(length=-1),
        request(length=10**20),
        request(CHAT, "Content-Length: 3"),
        request(CHAT, "Transfer-Encoding: chunked"),
        request(b"ZZ\r\nhello\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=False),
        request(b"FFFFFFFFFFFFFFFFF\r\nhello", "Transfer-Encoding: chunked", length=False),
        request(CHAT, "X-A: b\x01"),
    ],
    ids=["tls", "http2", "bytes", "negative", "huge", "twice", "both", "chunk", "chunk size", "control"],
)
def test_what_is_no_http_is_an_error_of_the_api(server: RunningServer, data: bytes) -> None:
    status, error = error_of(exchange(server, data))
    assert (status, error["code"], error["type"]) == (400, "invalid_http", "invalid_request_error")
    assert server.health() == 200


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: localhost\r\nX-A: b\x01\r\n\r\n", 400, "invalid_http"),
        (b"GET /v1/messages HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"b" * 65_536, 431, "head_too_large"),
        (b"BREW /v1/messages HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
        (b"PROPFIND /v1/messages HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, "method_not_allowed"),
        (
            b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
            415,
            "unsupported_media_type",
        ),
        (b"POST /v1/messages/x HTTP/1.1\r\nHost: localhost\r\n\r\n", 404, "unknown_endpoint"),
        (b"POST /v1/messages HTTP/1.1\r\nHost: elsewhere\r\n\r\n", 403, "host_not_allowed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_under_messages_every_error_has_the_shape_of_that_api(
    server: RunningServer, data: bytes, status: int, code: str
) -> None:
    answer = exchange(server, data)
    found, error = error_of(answer)
    assert (found, error["code"]) == (status, code)
    shaped = json.loads(answer.partition(b"\r\n\r\n")[2])
    # The parser reads no further than a method that it does not know.
    assert shaped.get("type") == "error" or data.startswith(b"BREW")


@pytest.mark.parametrize(
    "line",
    [
        b"GET /" + b"a" * 65_536,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"b" * 65_536,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 8192,
    ],
    ids=["path", "header", "headers"],
)
def test_a_head_without_an_end_is_refused(server: RunningServer, line: bytes) -> None:
    before = _memory(server)
    pieces = [line, *[b"c" * 65_536] * 200]
    status, error = error_of(exchange(server, line))
    assert (status, error["code"]) == (431, "head_too_large")
    for _ in range(8):
        exchange(server, *pieces, wait=0.2)
    assert _memory(server) < before + (32 << 20) and server.health() == 200


def test_what_follows_a_body_has_an_end(server: RunningServer) -> None:
    """Trailers, and the extensions of a chunk."""
    chunked = request(b"5\r\nhello\r\n", "Transfer-Encoding: chunked", length=False)
    before = _memory(server)
    for begun in (
        chunked + b"0\r\nX-A: ",
        chunked + b"0\r\n",
        request(b"5;x=", "Transfer-Encoding: chunked", length=False),
    ):
        exchange(server, begun, *[b"X-B: ccc\r\n" * 6553] * 200, wait=0.2)
    assert _memory(server) < before + (32 << 20) and server.health() == 200


def test_a_second_head_behind_a_running_request_has_an_end(server: RunningServer) -> None:
    slow = json.dumps({"messages": [{"role": "user", "content": "yo"}], "seed": 3, "stream": True, "max_tokens": 400})
    before = _memory(server)
    started = time.monotonic()
    exchange(server, request(slow.encode()), b"GET / HTTP/1.1\r\nX-A: ", *[b"c" * 65_536] * 200, wait=1)
    assert time.monotonic() - started < 10
    assert _memory(server) < before + (32 << 20) and server.health() == 200


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_gets_no_chunks(server: RunningServer, stream: bool) -> None:
    """Old proxies and tools ask so; the answer ends with the connection."""
    body = json.dumps({"messages": [{"role": "user", "content": "yo"}], "stream": stream}).encode()
    answer = exchange(server, request(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in head and b"chunked" not in head
    if stream:
        assert rest.endswith(b"data: [DONE]\n\n")
        assert all(line.startswith((b"data: ", b": ")) for line in rest.split(b"\n\n") if line)
    else:
        assert json.loads(rest)["choices"] and f"content-length: {len(rest)}".encode() in head


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    wrong = request(b"{}")
    data = exchange(server, request() + wrong + request(path="/nope") + request(CHAT, "Connection: close"))
    assert [part.split()[0] for part in data.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400", b"404", b"200"]


def test_a_body_that_comes_slowly_is_read_and_harms_nobody(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(10)
        data = request(CHAT, "Connection: close")
        for at in range(0, len(data), 40):
            connection.sendall(data[at : at + 40])
            assert server.health() == 200
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200") and ANSWER.encode() in answer


@pytest.mark.parametrize("length", [(64 << 20) + 1, 10**10, 10**15])
def test_a_giant_body_is_refused_before_it_comes(server: RunningServer, length: int) -> None:
    status, error = error_of(exchange(server, request(b"", length=length)))
    assert status == 413 and error["code"]


def test_a_giant_body_in_chunks_is_refused_as_it_comes(server: RunningServer) -> None:
    before = _memory(server)
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    answer = exchange(server, request(b"", "Transfer-Encoding: chunked", length=False), *[chunk] * 128)
    assert not answer or error_of(answer)[0] == 413
    assert _memory(server) < before + (160 << 20) and server.health() == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_an_encoded_body_is_refused_by_name(server: RunningServer, encoding: str) -> None:
    """Nothing decodes it, so nothing may take it for what it stands for."""
    status, error = error_of(exchange(server, request(CHAT, f"Content-Encoding: {encoding}", "Connection: close")))
    assert (status, error["param"]) == (415, "content-encoding")
    assert exchange(server, request(CHAT, "Content-Encoding: identity", "Connection: close")).startswith(
        b"HTTP/1.1 200"
    )


def test_an_unfinished_request_is_nothing(server: RunningServer, tmp_path: Path) -> None:
    submitted = len(server.events("submit"))
    for cut in (1, 10, 60, len(request()) - 1):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request()[:cut])
    assert server.health() == 200 and len(server.events("submit")) == submitted


def test_connections_of_tls_that_break_off_leave_nothing(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
    script = {"default": behaviour("slow ", end=None, delay=0.05)}
    flags = ["--ssl-certfile", str(tmp_path / "server.pem")]
    running = RunningServer(tmp_path, script, make_checkpoint(tmp_path / "model"), *flags)

    def healthy() -> bool:
        try:
            return httpx.get(f"https://127.0.0.1:{running.port}/health", verify=context).status_code == 200
        except httpx.TransportError:
            return False

    def files() -> int:
        return len(list(Path(f"/proc/{running.process.pid}/fd").iterdir()))

    def plain() -> socket.socket:
        return socket.create_connection(("127.0.0.1", running.port))

    def broken_off(data: bytes, wait: bool) -> None:
        """Ends without the goodbye of TLS."""
        secured = context.wrap_socket(plain(), server_hostname="127.0.0.1")
        secured.sendall(data)
        if wait:
            secured.recv(1)
        os.close(secured.detach())

    try:
        eventually(healthy, 20)
        before = files()
        streamed = json.dumps({"messages": [{"role": "user", "content": "yo"}], "stream": True}).encode()
        for _ in range(20):
            with plain() as connection:
                connection.sendall(b"\x16\x03\x01\x02\x00")
            with plain() as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(1 << 16)[:4] != b"HTTP"
            broken_off(request()[:50], wait=False)
            broken_off(request(streamed), wait=True)
        eventually(lambda: files() <= before + 1, 20)
        eventually(lambda: len(running.events("abort")) == len(running.events("submit")) == 20, 20)
        assert healthy()
        assert "Traceback" not in running.output.read_text()
    finally:
        running.close()


def _memory(server: RunningServer) -> int:
    """Most bytes that the API process ever had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10
