"""Reading a request's body and writing its answer, with the client's going away noticed at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atlas.serve.access.limits import account_of
from atlas.serve.errors import NEXT_EVENT, ApiError, error_event

logger = logging.getLogger("atlas.serve")

MAX_BODY = 32 << 20
BODY_SECONDS = 60.0
DONE = b"data: [DONE]\n\n"
PING_SECONDS = 10.0
PIECE_BYTES = 256 << 10

T = TypeVar("T")

_encoder = msgspec.json.Encoder()


async def read_body(request: Request) -> list[bytes]:
    """The body of a JSON request, in the pieces that it came in: joining them takes a while, too.

    Raises ApiError 413 above MAX_BODY, 408 when it takes too long to arrive, 429 when too much does at once.
    """
    account = account_of(request.scope)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        if int(declared) > 2 * MAX_BODY:
            raise _too_large()
        account.hold(min(int(declared), MAX_BODY))
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= MAX_BODY:
                    account.hold(size)
                    parts.append(part)
                    continue
                # A client that is cut off while it still sends never reads why; so take a little more than allowed.
                parts.clear()
                if size > 2 * MAX_BODY:
                    break
    except TimeoutError:
        message = f"request body: not complete after {BODY_SECONDS:g} s"
        raise ApiError(408, "request_timeout", message, headers={"Connection": "close"}) from None
    if size > MAX_BODY:
        raise _too_large()
    return parts


def _too_large() -> ApiError:
    message = f"request body: too large; accepted: at most {MAX_BODY} bytes"
    return ApiError(413, "request_too_large", message, headers={"Connection": "close"})


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; cancelled, and ClientDisconnect raised, when the client goes away first.

    Cancelled itself it raises CancelledError whatever else happens, once `work` has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel(task, gone)


class JsonResponse(Response):
    """JSON in bytes. A long one is sent in pieces, each when the client has taken the one before: what is sent at once
    is the system's and nobody's, and the request would be over before it is read."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for at in range(0, len(self.body), PIECE_BYTES):
            await send(_body(bytes(self.body[at : at + PIECE_BYTES])))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(value: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """A struct as a JSON response."""
    return JsonResponse(_encoder.encode(value), status, headers)


def event(value: Any) -> bytes:
    """A struct as one server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventStream(Response):
    """Server-sent events from an async generator, which is closed as soon as the client goes away.

    An ApiError (or a fault of our own) after the headers becomes an error event, as the API that was asked words it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        *,
        end: bytes = DONE,
        ping: bytes = b"",
        first_event: int | None = None,
    ) -> None:
        """end: always the last that is sent, so that a client that reads on never waits for something that does not
        come.  ping: sent after every PING_SECONDS without an event, for whoever takes a silent connection for a dead
        one.  first_event: the number of the first event, of an API that counts them."""
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events, self._end, self._ping = events, end, ping
        self._next_event = first_event
        self._sent = 0
        self._sending = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._next_event is not None:
            scope[NEXT_EVENT] = lambda: self._next_event
        writing = asyncio.ensure_future(self._write(scope, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        seconds = PING_SECONDS if self._ping else None
        try:
            done, sent = False, 0
            while not done:
                finished, _ = await asyncio.wait((writing, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                done = bool(finished)
                # Between two events only: a client that does not read is owed no ping.
                if not done and not self._sending and sent == self._sent:
                    await send(_body(self._ping))
                sent = self._sent
            if writing.done():
                writing.result()
        finally:
            try:
                await _cancel(writing, gone)
            finally:
                await self._events.aclose()

    async def _write(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._sending = False
        try:
            async for chunk in self._events:
                self._sending = True
                if self._next_event is not None:
                    self._next_event += chunk.count(b"\n\n")  # which stands nowhere in an event
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._sending = False
                self._sent += 1
        except ApiError as error:
            await send(_body(error_event(scope, error)))
        except Exception:
            logger.exception("a stream broke off")
            fault = ApiError(500, "internal_error", "the server failed while it wrote this stream")
            await send(_body(error_event(scope, fault)))
        self._sending = True
        if self._end:
            await send(_body(self._end))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """End these tasks, and wait until they have. A cancellation that comes meanwhile is for the caller, whatever theirs
    is: it is raised when they have ended."""
    for task in tasks:
        task.cancel()
    outer: asyncio.CancelledError | None = None
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            outer = error  # theirs goes on as it is: another would break what they do at their end
    for task in tasks:
        if not task.cancelled():
            task.exception()  # has been told, or is of no interest; asked for, nobody logs it
    if outer is not None:
        raise outer
