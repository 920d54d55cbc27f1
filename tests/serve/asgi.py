"""Layers of the server without a server: ASGI calls made by hand, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Headers = Iterable[tuple[str, str | bytes]]


class Answer(msgspec.Struct):
    """What an application sent."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.body)["error"]
        return found


def scope_of(method: str, path: str, headers: Headers, scheme: str = "http") -> Scope:
    raw = [
        (name.lower().encode(), value if isinstance(value, bytes) else value.encode("latin-1"))
        for name, value in headers
    ]
    return {
        "type": "http",
        "method": method,
        "path": path,
        "scheme": scheme,
        "headers": raw,
        "query_string": b"",
        "http_version": "1.1",
    }


async def ask(
    app: ASGIApp, method: str = "POST", path: str = "/v1/x", headers: Headers = (), scheme: str = "http"
) -> Answer:
    """One request with an empty body, and its whole answer."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(dict(message))

    await app(scope_of(method, path, headers, scheme), nothing_more(), send)
    start = messages[0]
    assert start["type"] == "http.response.start" and not messages[-1].get("more_body"), messages
    raw = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], raw, b"".join(message.get("body", b"") for message in messages[1:]))


def nothing_more() -> Receive:
    """An empty body; then the client stays."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive


class Inner:
    """The application behind a layer: notes the requests that reach it. `work` is done before it answers."""

    def __init__(self, work: Callable[[Scope], Awaitable[None]] | None = None) -> None:
        self.scopes: list[Scope] = []
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if self._work is not None:
            await self._work(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})
