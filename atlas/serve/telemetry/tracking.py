"""One record for each HTTP request: its id, what became of it, and how long that took.

The outermost layer of the application makes the record; those who see something happen write it down, through the
current context, so that nothing has to be handed through. When the answer's last byte is sent it becomes one line of
the log, numbers of /metrics, and whatever else listens (`Service.finished`: traces).
"""

from __future__ import annotations

import asyncio
import collections
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from time import perf_counter
from types import TracebackType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atlas import logs
from atlas.engine.messages import FinishReason, Timing
from atlas.serve.telemetry.metrics import Metrics

logger = logging.getLogger("atlas.requests")

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
UNKNOWN = "other"
"""The label of an endpoint that does not exist, and of a method that no endpoint has."""

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")


class Record:
    """One HTTP request. Times are of `perf_counter`; `began_at` is the epoch's seconds.

    endpoint: the path of the route, not what the client wrote.  arrived: when its body was complete.
    status: of the answer; 0 before.  error: the code of the error that the client got.
    """

    def __init__(self, request_id: str, method: str, headers: list[tuple[bytes, bytes]], metrics: Metrics) -> None:
        self.id, self.method, self.headers, self.metrics = request_id, method, headers, metrics
        self.endpoint = UNKNOWN
        self.status = 0
        self.error: str | None = None
        self.began_at = time.time()
        self.began = self.arrived = self.ended = perf_counter()
        self.generations: list[Generation] = []

    def summary(self) -> dict[str, Any]:
        """The fields of its line in the log. No text of a user is among them."""
        fields: dict[str, Any] = {
            "method": self.method,
            "endpoint": self.endpoint,
            "status": self.status,
            "seconds": round(self.ended - self.began, 6),
        }
        if self.error is not None:
            fields["error"] = self.error
        if self.generations:
            fields["prompt_tokens"] = sum(one.prompt_tokens for one in self.generations if one.first_choice)
            fields["generated_tokens"] = sum(one.tokens for one in self.generations)
            fields["finish_reasons"] = collections.Counter(one.finish_reason for one in self.generations)
            firsts = [one.first for one in self.generations if one.first]
            if firsts:
                fields["first_token_seconds"] = round(min(firsts) - self.arrived, 6)
            timings = [one.timing for one in self.generations if one.timing is not None]
            if timings:
                fields["queue_seconds"] = round(max(timing.queued for timing in timings), 6)
                fields["prefill_seconds"] = round(max(timing.prefill for timing in timings), 6)
        return fields


current: ContextVar[Record | None] = ContextVar("record", default=None)


def failed(code: str) -> str | None:
    """The current request gets an error. Returns its id."""
    if (record := current.get()) is None:
        return None
    record.error = code
    return record.id


class Generation:
    """One choice on its way, as a context manager around it."""

    def __init__(self, prompt_tokens: int, max_tokens: int, first_choice: bool) -> None:
        self.prompt_tokens, self.max_tokens, self.first_choice = prompt_tokens, max_tokens, first_choice
        self.tokens = 0
        self.began = self.first = self.last = self.ended = 0.0
        self.timing: Timing | None = None
        self.finish_reason: FinishReason | None = None
        self._record = current.get()
        if self._record is not None:
            metrics = self._record.metrics
            self._inter_token, self._generated = metrics.inter_token.of(), metrics.generation_tokens

    def __enter__(self) -> Generation:
        self.began = perf_counter()
        if self._record is not None:
            self._record.generations.append(self)
        return self

    def received(self, tokens: int, timing: Timing | None) -> None:
        """So many tokens arrived; `timing` comes with the first of them."""
        if timing is not None:
            self.timing = timing
        if not tokens or self._record is None:
            return
        now = perf_counter()
        if self.tokens:
            self._inter_token.observe((now - self.last) / tokens, tokens)
        else:
            self.first = now
            self._record.metrics.first_token.observe(now - self._record.arrived)
            self._record.metrics.prompt_tokens.add(self.prompt_tokens)
            if tokens > 1:
                self._inter_token.observe(0.0, tokens - 1)
        self._generated.add(tokens)
        self.last = now
        self.tokens += tokens

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.ended = perf_counter()
        if self.finish_reason is None:
            gone = kind is None or issubclass(kind, asyncio.CancelledError | GeneratorExit)
            self.finish_reason = "abort" if gone else "error"
        if self._record is not None:
            self._count(self._record)

    def _count(self, record: Record) -> None:
        assert self.finish_reason is not None
        metrics = record.metrics
        metrics.requests.add(1, record.endpoint, self.finish_reason)
        metrics.end_to_end.observe(self.ended - record.arrived)
        metrics.prompt_lengths.observe(self.prompt_tokens)
        metrics.generation_lengths.observe(self.tokens)
        metrics.max_tokens.observe(self.max_tokens)
        if self.timing is not None:
            metrics.queue.observe(self.timing.queued)
            metrics.prefill.observe(self.timing.prefill)
            metrics.inference.observe(self.timing.prefill + self.last - self.first)
        if self.tokens:
            metrics.decode.observe(self.last - self.first)
        if self.tokens > 1:
            metrics.per_output_token.observe((self.last - self.first) / (self.tokens - 1))


class Tracking:
    """The layer that makes records and gives every answer its `x-request-id` (and `request-id`)."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        finished: Sequence[Callable[[Record], None]],
        route_of: Callable[[str], str | None],
    ) -> None:
        """
        Args:
            finished: each is called with the record of every request that has ended.
            route_of: the route that a path has, known before a layer may refuse the request; None: it has none.
        """
        self._app, self._metrics, self._finished, self._route_of = app, metrics, finished, route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else UNKNOWN
        record = Record(_request_id(scope["headers"]), method, scope["headers"], self._metrics)
        record.endpoint = self._route_of(scope["path"]) or UNKNOWN

        async def tracked_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                record.arrived = perf_counter()
            return message

        async def tracked_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                # Clients of OpenAI's API read the first, those of Anthropic's the second.
                names = (b"x-request-id", b"request-id")
                ids = [(name, record.id.encode()) for name in names]
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        tokens = current.set(record), logs.request_id.set(record.id)
        try:
            await self._app(scope, tracked_receive, tracked_send)
        finally:
            self._end(record)
            current.reset(tokens[0])
            logs.request_id.reset(tokens[1])

    def _end(self, record: Record) -> None:
        record.ended = perf_counter()
        metrics, fields = record.metrics, record.summary()
        metrics.http_requests.add(1, record.endpoint, record.method, str(record.status))
        metrics.http_seconds.of(record.endpoint, record.method).observe(record.ended - record.began)
        if record.error is not None:
            metrics.errors.add(1, record.endpoint, record.error)
        # Probes and scrapes come every few seconds; who has no key is of interest whatever was asked.
        level = logging.INFO if record.method == "POST" or record.status == 401 else logging.DEBUG
        if logger.isEnabledFor(level):
            logger.log(level, "%s", _sentence(fields), extra={"fields": fields})
        for listener in self._finished:
            try:
                listener(record)
            except Exception:  # the answer has been sent, and it was right
                logger.exception("a listener failed")


def _sentence(fields: dict[str, Any]) -> str:
    text = f"{fields['method']} {fields['endpoint']} {fields['status']} in {fields['seconds']:.3f} s"
    if "finish_reasons" in fields:
        reasons = ", ".join(f"{reason} {count}" for reason, count in fields["finish_reasons"].items())
        text += f": {fields['prompt_tokens']} prompt tokens, {fields['generated_tokens']} generated; {reasons}"
    return text + (f"; error {fields['error']}" if "error" in fields else "")


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's own id where it can stand in a header, a log and a URL; else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _SANE_ID.fullmatch(found := value.decode("latin-1")):
            return found
    return "req_" + secrets.token_hex(12)
