"""What a connection may cost: files, memory, and time in which nothing moves."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import resource
import socket
from collections.abc import Sized
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from atlas.serve.errors import ApiError

if TYPE_CHECKING:
    from asyncio import Protocol
else:
    Protocol = object

logger = logging.getLogger("atlas.serve")

HEAD_BYTES = 64 << 10
"""What a request may have besides its body. A head that arrives in one piece may be longer: it is there already."""
HEAD_SECONDS = 30.0
"""How long the head of a request may take to arrive. uvicorn has a limit for the time between two requests only."""
MAX_PIPELINED = 16
"""Requests that a client may send while one of its own is answered. A piece of what it sends may have thousands, which
would all be read at once: with eight such clients others waited half a second."""
UNSENT_BYTES = 128 << 10
"""What the system holds of a stream whose client is behind. The rest waits here as tokens, which share an event when
the client reads again; without a limit the system's own buffers grow to megabytes."""


def limit_writes(listener: socket.socket, seconds: float) -> None:
    """The system ends connections whose client takes nothing for so long, although there is something to take: one that
    does not read, and one that is gone without a word. It does so below TLS, and whatever this process is busy with."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(seconds * 1000)))
    else:
        logger.warning("--write-timeout: this system cannot end connections whose client does not read")
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def raise_file_limit() -> int:
    """Let this process open as many files as it may: each connection is one. Returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS takes no "unlimited" here
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class _HeadTimeout(Protocol):
    """In front of a protocol of uvicorn. Its `cycle` is the request whose head came last."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    cycle: Any
    scope: Any
    url: bytes = b""
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._done()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._done()
        elif self._waiting is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()  # part of a head: this ended the time that uvicorn gives between requests

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._late)

    def _done(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _late(self) -> None:
        self._waiting = None
        self.transport.close()

    def send_400_response(self, message: str) -> None:
        """What uvicorn answers to what is no HTTP, in the words of the API."""
        self._refuse(ApiError(400, "invalid_http", message))

    def _refuse(self, error: ApiError) -> None:
        # As far as it was read: without a path it is nobody's API, and OpenAI's shape.
        body = error.encode_for({"path": self.url.partition(b"?")[0].decode("latin-1")})
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class _AnyLength(int):
    """What is left to send of an answer whose length nobody knows: enough for more, and nothing where it ends."""

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _AnyLength:
        return self


class _HeadLimit(_HeadTimeout):
    """In front of the protocol by httptools, which keeps a head, or what follows a body, of any length."""

    pipeline: Sized
    _besides = 0

    def send_400_response(self, message: str) -> None:
        """An error would stand inside of an answer that has begun: then the connection ends, and says nothing."""
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if begun or self.pipeline:
            self.transport.close()
        else:
            super().send_400_response(message)

    def data_received(self, data: bytes) -> None:
        self._besides += len(data)
        super().data_received(data)
        if self._besides > HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self._refuse(ApiError(431, "head_too_large", f"request head: more than {HEAD_BYTES} bytes"))
            else:
                self.transport.close()

    def on_headers_complete(self) -> None:
        self._besides = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")  # which ends the reading, and so the connection
        super().on_headers_complete()  # type: ignore[misc]
        if self.scope["http_version"] == "1.0":
            # It knows no chunks, which uvicorn would send: a stream ends with the connection.
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()

    def on_body(self, body: bytes) -> None:
        self._besides = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        self._besides = 0
        super().on_message_complete()  # type: ignore[misc]


def http_protocol() -> type[asyncio.Protocol]:
    """uvicorn's HTTP, by `httptools` where that is installed, that neither waits for ever for a request's head nor
    keeps one of any length."""
    if importlib.util.find_spec("httptools"):
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        return type("HttpTools", (_HeadLimit, HttpToolsProtocol), {})
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return type("H11", (_HeadTimeout, H11Protocol), {})
