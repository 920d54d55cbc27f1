"""The stream under /v1/messages: its framing, pings, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from asgi import nothing_more, scope_of

from atlas.serve import http
from atlas.serve.errors import ApiError
from atlas.serve.http import EventStream

PING = b"event: ping\ndata: {}\n\n"


async def _bytes_of(stream: EventStream, path: str = "/v1/messages") -> list[bytes]:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await stream(scope_of("POST", path, ()), nothing_more(), send)
    return [chunk for chunk in sent if chunk]


async def _slow(*pieces: float | bytes | Exception) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        match piece:
            case bytes():
                yield piece
            case Exception():
                raise piece
            case _:
                await asyncio.sleep(piece)


def test_silence_is_broken_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PING_SECONDS", 0.05)
    sent = asyncio.run(_bytes_of(EventStream(_slow(b"a", 0.18, b"b", b"c"), {}, end=b"", ping=PING)))
    assert sent[0] == b"a" and sent[-2:] == [b"b", b"c"]
    assert set(sent[1:-2]) == {PING} and 1 <= len(sent[1:-2]) <= 3
    assert asyncio.run(_bytes_of(EventStream(_slow(b"a", 0.12, b"b"), {}, end=b""))) == [b"a", b"b"]


def test_a_busy_stream_has_no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PING_SECONDS", 0.3)
    pieces = [piece for n in range(12) for piece in (0.04, b"%d" % n)]
    sent = asyncio.run(_bytes_of(EventStream(_slow(*pieces), {}, end=b"", ping=PING)))
    assert sent == [b"%d" % n for n in range(12)]


@pytest.mark.parametrize("fault", [ApiError(500, "generation_failed", "it broke"), ValueError("ours")])
def test_a_stream_that_breaks_off_ends_with_an_error_event(fault: Exception) -> None:
    stream = EventStream(_slow(b"a", fault), {}, end=b"")
    first, last = asyncio.run(_bytes_of(stream))
    assert first == b"a"
    assert last.startswith(b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"')
    *_, event, done = asyncio.run(_bytes_of(EventStream(_slow(b"a", fault), {}), "/v1/chat/completions"))
    assert event.startswith(b'data: {"error":{"message":"') and done == b"data: [DONE]\n\n"
