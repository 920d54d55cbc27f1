"""Responses that are made while nobody waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from itertools import accumulate, islice, takewhile
from typing import TYPE_CHECKING

from atlas.serve.access.limits import Account
from atlas.serve.errors import ApiError
from atlas.serve.openai.response_events import StreamEvent
from atlas.serve.openai.response_store import Record

if TYPE_CHECKING:
    from atlas.serve.openai.responses_making import Making

MAX_LOG = 4 << 20
"""Bytes of events of one response that are kept for who comes later: about 16,000 tokens. Then the oldest go."""


MAX_PIECE = 64 << 10
"""Bytes of events that are sent at once, unless one has more."""


class EventLog:
    """The events of one stream, and whoever waits for the next."""

    def __init__(self, events: Iterable[bytes] = (), first: int = 0, *, ended: bool = False) -> None:
        """first: sequence number of the first of `events`."""
        self.events, self.first, self._ended = deque(events), first, ended
        self._bytes = sum(map(len, self.events))
        self._more = asyncio.Event()

    def add(self, events: Iterable[bytes]) -> None:
        """More events; nobody is told before `tell`."""
        for event in events:
            self.events.append(event)
            self._bytes += len(event)
        while self._bytes > MAX_LOG and len(self.events) > 1:
            self._bytes -= len(self.events.popleft())
            self.first += 1

    def tell(self, *, last: bool = False) -> None:
        """Give what was added to those who wait. last: it was all."""
        self._ended = last
        self._more.set()
        self._more = asyncio.Event()

    def check(self, after: int) -> None:
        """Raises ApiError 400 if events after that of sequence number `after` are gone."""
        if after + 1 < self.first:
            message = f"starting_after: {after}; events before number {self.first} are not kept"
            raise ApiError(400, "events_not_kept", message, "starting_after")

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """The events after that of sequence number `after`, as they come. Raises ApiError where they are gone."""
        position = after + 1
        while True:
            self.check(position - 1)
            # Of a deque, the nearer end is at hand, the middle is not.
            fresh = list(islice(reversed(self.events), max(0, self.first + len(self.events) - position)))[::-1]
            if fresh:
                # In pieces, for the client may not read: each is copied until it does.
                piece = _beginning(fresh, MAX_PIECE)
                position += len(piece)
                yield b"".join(piece)
            elif self._ended:
                return
            else:
                await self._more.wait()


def _beginning(events: list[bytes], size: int) -> list[bytes]:
    """As many of the first as have `size` bytes, and at least one."""
    sizes = accumulate(map(len, events))
    return events[: max(1, sum(1 for _ in takewhile(size.__ge__, sizes)))]


class Run:
    """A response in the background. `log` is None unless the request asked for a stream."""

    def __init__(self, making: Making, account: Account, timeout: float | None, log: EventLog | None) -> None:
        """timeout: seconds that it may take; None: as long as it takes.  log: with what `making` has said so far."""
        self.making, self.log = making, log
        self._account, self._timeout = account, timeout
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def recorded(self) -> Record:
        """The response as it is now."""
        return await self.making.recorded()

    def start(self, ended: Callable[[], None]) -> None:
        """Begin. ended: called when the response is in the store."""
        self._task = asyncio.create_task(self._work(ended))

    async def cancel(self) -> None:
        """Stop it. It is stored as cancelled, unless it is at its end already."""
        assert self._task is not None
        if not self._closing:
            self._task.cancel()
        await asyncio.wait((self._task,))

    async def _work(self, ended: Callable[[], None]) -> None:
        making, last = self.making, list[StreamEvent]()
        try:
            async with self._account.within(self._timeout):
                async for events in making.events(self._account):
                    if making.ended:
                        last = events
                    else:
                        await self._say(events)
        except asyncio.CancelledError:
            last = making.writer.cancel()
        except TimeoutError:
            assert self._account.expired is not None
            last = making.fail(self._account.expired)
        except ApiError as error:
            last = making.fail(error)
        except Exception:
            last = making.fault()
        self._closing = True
        self._account.close()
        log = self.log
        try:
            if log is not None:
                log.add(await making.encoded(last))
            await making.keep(await making.recorded(*((log.events, log.first) if log else ())))
        finally:
            # Whoever reads of the end may at once go on from there: by then the response is in the store.
            ended()
            if log is not None:
                log.tell(last=True)

    async def _say(self, events: list[StreamEvent]) -> None:
        if self.log is not None:
            self.log.add(await self.making.encoded(events))
            self.log.tell()


class Background:
    """The responses that are made in the background now, by whose they are."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def start(self, client: str, run: Run) -> None:
        """Begin a run, and know it until it ends. A shutdown waits for those that are known."""
        key = client, run.making.writer.response.id
        self._runs[key] = run

        def forget() -> None:
            del self._runs[key]

        run.start(forget)

    def find(self, client: str, response_id: str) -> Run | None:
        """The run that makes this response, if there is one and it is this client's."""
        return self._runs.get((client, response_id))
