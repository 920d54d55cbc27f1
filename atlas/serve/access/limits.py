"""How much: requests and tokens per minute, requests at once, in preparation, in the queue, and the time one may take.

All in this process: one server has one API process, so nothing has to be shared or stored. Rates are token buckets that
hold one minute's worth. Requests are paid before, tokens as they come (nobody knows before how long an answer gets), so
a bucket of tokens may go into debt, and the next request waits until that is paid.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atlas.config import ServeConfig
from atlas.engine.client import EngineStream
from atlas.serve import offload
from atlas.serve.access.auth import ANONYMOUS, CLIENT
from atlas.serve.access.preparation import Place, Preparation
from atlas.serve.errors import ApiError, error_event, speaks_anthropic, speaks_responses, too_many, unavailable

ACCOUNT = "atlas.account"
"""Where the scope keeps a request's Account."""

_LAST_WORDS_SECONDS = 1.0
"""How long a client may take to read why its stream was cut off. One that does not read must not hold on to us."""


class Bucket:
    """`per_minute` at most, after a pause all at once. The level is computed when it is asked for."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.capacity, self._clock = per_minute, clock
        self._level, self._then = float(per_minute), clock()

    @property
    def level(self) -> float:
        """What may be spent now; below 0 where more was spent than there was."""
        now = self._clock()
        self._level = min(float(self.capacity), self._level + (now - self._then) * self.capacity / 60)
        self._then = now
        return self._level

    def spend(self, amount: int) -> None:
        """Take `amount` out, be it there or not."""
        self._level = self.level - amount

    def wait(self) -> float:
        """Seconds until one unit is there."""
        return max(0.0, (1 - self.level) * 60 / self.capacity)


class Client:
    """What one API key has used."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float]) -> None:
        self.active, self._max_active = 0, config.max_concurrent
        requests, tokens = config.requests_per_minute, config.tokens_per_minute
        self.requests = Bucket(requests, clock) if requests else None
        self.tokens = Bucket(tokens, clock) if tokens else None

    def admit(self) -> None:
        """One more request. Raises ApiError 429; then nothing has been taken."""
        if self._max_active is not None and self.active >= self._max_active:
            message = f"{self.active} requests of this API key are under way; accepted: at most {self._max_active}"
            raise too_many("concurrency_limit_exceeded", message, 1, self.headers())
        for kind, bucket in (("tokens", self.tokens), ("requests", self.requests)):
            if bucket is not None and (wait := bucket.wait()) > 0:
                message = f"this API key has used its {kind}; accepted: {bucket.capacity} per minute"
                raise too_many("rate_limit_exceeded", message, math.ceil(wait), self.headers())
        if self.requests is not None:
            self.requests.spend(1)

    def headers(self) -> dict[str, str]:
        """What is left, in the names that OpenAI's API uses."""
        found = {}
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{kind}"] = str(bucket.capacity)
                found[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level)))
        return found


class Queue:
    """Sequences that wait for their first token.

    Where it is full, whoever has less than a share of it is still let in: the limit divided by how many have something
    there, so that nobody can keep others out. With k of them there are never more than 1 + 1/2 + ... + 1/k limits.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.waiting = limit, 0
        self._owners = Counter[str]()

    def enter(self, owner: str, sequences: int) -> None:
        """Raises ApiError 429 where too many wait. An empty queue takes any one request."""
        own = self._owners[owner]
        share = self.limit // (len(self._owners) + (owner not in self._owners))
        if self.waiting and self.waiting + sequences > self.limit and own + sequences > share:
            message = f"{self.waiting} sequences wait for the engine, {own} of them this client's"
            raise too_many("queue_full", f"{message}; accepted: at most {self.limit} (--max-queue)", 1)
        self.waiting += sequences
        self._owners[owner] += sequences

    def leave(self, owner: str, sequences: int) -> None:
        """So many of an owner's wait no longer."""
        self.waiting -= sequences
        self._owners[owner] -= sequences
        if not self._owners[owner]:
            del self._owners[owner]


class Account:
    """What one request uses. An account of nobody, for work that no client asked for, is never refused."""

    def __init__(
        self,
        client: Client | None = None,
        queue: Queue | None = None,
        place: Place | None = None,
        owner: str = "",
    ) -> None:
        """place: among the requests in preparation; until sequences of it are in the queue.  owner: who shares that
        with others."""
        self._client, self._queue, self._waiting, self._place, self._owner = client, queue, 0, place, owner
        self._goes_on = False
        self.streams: list[EngineStream] = []
        """What the engine makes for the request."""
        self.expired: ApiError | None = None
        """Set when its time is over."""

    def abort(self, reason: str) -> None:
        """End what still runs in the engine."""
        for stream in self.streams:
            stream.abort(reason)

    @contextlib.asynccontextmanager
    async def within(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Bounds the time of what is done inside. Where the engine works for it, that ends, and whoever follows it
        raises `expired` after its last tokens, or is cancelled soon; all else is cancelled at once: TimeoutError.
        """

        def expire() -> None:
            message = f"not finished after {seconds:g} s, the longest that this server takes (--request-timeout)"
            # Clients that try again would only take as long once more.
            self.expired = ApiError(504, "request_timed_out", message, headers={"x-should-retry": "false"})
            self.abort(message)
            timeout.reschedule(loop.time() + (_LAST_WORDS_SECONDS if self.streams else 0))

        loop = asyncio.get_running_loop()
        expiry = None if seconds is None else loop.call_later(seconds, expire)
        try:
            async with asyncio.timeout(None) as timeout:
                yield timeout
        finally:
            if expiry is not None:
                expiry.cancel()

    def hold(self, size: int) -> None:
        """So many bytes in all are kept of the request while it is in preparation. Raises ApiError 429 where too many
        are."""
        if self._place is not None:
            self._place.hold(size)

    def _prepared(self, kept: int = 0) -> None:
        """Its body and what was made of it are let go, but for `kept` bytes."""
        if self._place is not None:
            self._place.leave(kept)

    def outlive(self) -> Account:
        """An account for work that goes on when the request is over. Until it is closed, that counts as a request under
        way."""
        account = Account(self._client, self._queue, self._place, self._owner)
        self._place = None
        if self._client is not None:
            self._client.active += 1
            account._goes_on = True
        return account

    def enter_queue(self, sequences: int, kept: int = 0) -> None:
        """`sequences` are about to wait for the engine. Raises ApiError 429, as `Queue.enter`.

        kept: bytes of the request that are needed until its end.
        """
        self._prepared(kept)
        if self._queue is not None:
            self._queue.enter(self._owner, sequences)
            self._waiting += sequences

    def leave_queue(self) -> None:
        """One sequence has its first token."""
        if self._queue is not None and self._waiting:
            self._queue.leave(self._owner, 1)
            self._waiting -= 1

    def spend(self, tokens: int) -> None:
        """So many tokens were taken in or put out."""
        if self._client is not None and self._client.tokens is not None:
            self._client.tokens.spend(tokens)

    def close(self) -> None:
        """The request is over, whatever became of it."""
        self._prepared()
        if self._queue is not None and self._waiting:
            self._queue.leave(self._owner, self._waiting)
        self._waiting = 0
        if self._goes_on and self._client is not None:
            self._client.active -= 1
        self._goes_on = False


def account_of(scope: Scope) -> Account:
    """The account of a request."""
    account: Account = scope.get(ACCOUNT) or Account()
    return account


class Limits:
    """Answers 429 to a POST above its key's limits, before its body is read. All who need no key share one."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServeConfig,
        clock: Callable[[], float] = time.monotonic,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """draining: whether the server is about to end: then it answers 503 instead."""
        self._app, self._config, self._clock, self._draining = app, config, clock, draining
        self._clients: dict[str, Client] = {}  # as many as there are keys
        self._queue = Queue(config.max_queue)
        self._preparation = Preparation()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = scope.get(CLIENT, ANONYMOUS)
        owner = _owner(scope, name)
        offload.owner.set(owner)  # of this request's task, which ends with it
        if scope["method"] != "POST":
            account = scope[ACCOUNT] = Account(place=Place(self._preparation, owner, 0))
            try:
                await self._app(scope, receive, send)
            finally:
                account.close()
            return
        client = self._clients.get(name) or self._clients.setdefault(name, Client(self._config, self._clock))
        try:
            place = self._preparation.enter(owner)
            try:
                client.admit()
            except ApiError:
                place.leave()
                raise
        except ApiError as error:
            ending = unavailable("server_shutting_down", "the server is shutting down")
            await (ending if self._draining() else error).response(scope)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _with(message.get("headers", ()), client.headers())}
            await send(message)

        # Where there is nothing to say, no token of a stream pays for a layer more.
        sending = with_headers if client.requests or client.tokens else send
        account = scope[ACCOUNT] = Account(client, self._queue, place, owner)
        client.active += 1
        try:
            await self._app(scope, receive, sending)
        finally:
            client.active -= 1
            account.close()


def _owner(scope: Scope, name: str) -> str:
    """Who shares work and room with others: a key's clients, or where nobody needs a key, those of one address."""
    return name if name != ANONYMOUS or not scope.get("client") else scope["client"][0]


def _with(headers: Iterable[tuple[bytes, bytes]], more: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    there = list(headers)
    names = {name.lower() for name, _ in there}
    added = [(name.encode(), value.encode()) for name, value in more.items()]
    return there + [header for header in added if header[0] not in names]


class Deadline:
    """Ends a POST that takes longer than `seconds`: with 504, or with an error event where a stream has begun."""

    def __init__(self, app: ASGIApp, seconds: float | None) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._seconds is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        begun = streaming = ended = False

        async def sending(message: Message) -> None:
            nonlocal begun, streaming, ended
            if message["type"] == "http.response.start":
                begun = True
                streaming = dict(message.get("headers", ())).get(b"content-type", b"").startswith(b"text/event-stream")
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body"))
            await send(message)

        account = account_of(scope)
        try:
            async with account.within(self._seconds) as timeout:
                await self._app(scope, receive, sending)
            return
        except TimeoutError:
            if not timeout.expired():
                raise
        error = account.expired
        assert error is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                if not begun:
                    await error.response(scope)(scope, receive, send)
                elif streaming and not ended:
                    await send({"type": "http.response.body", "body": _last_event(scope, error), "more_body": False})


def _last_event(scope: Scope, error: ApiError) -> bytes:
    ends = speaks_anthropic(scope) or speaks_responses(scope)
    return error_event(scope, error) + (b"" if ends else b"data: [DONE]\n\n")
