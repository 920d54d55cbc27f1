"""Daemon threads for work that would stall the event loop, shared out fairly among those whose work it is.

Not `asyncio.to_thread`: its threads are joined when the interpreter exits, so a tokeniser that is still busy
with one huge prompt (nothing can interrupt it) would hold up a shutdown that promised to be quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

owner: ContextVar[str] = ContextVar("owner", default="")
"""Whose work the current task does: of a request, who asks."""


class Offload:
    """A small pool of daemon threads, started when first used.

    Owners take turns, so that whoever asks for little waits for at most one work of each other; and of several threads
    one owner never has all, so that the work of another begins at once although all of the first one's is long.
    """

    def __init__(self, threads: int = 3) -> None:
        self._limit, self._most = threads, max(1, threads - 1)
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()  # whose turn it is comes first
        self._running: Counter[str] = Counter()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """The result of `function(*args)`, computed in a thread. Not begun if this is cancelled before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(setter: Callable[[Any], None], value: Any) -> None:
            if not future.done():  # it is done when its request was cancelled
                setter(value)

        def work() -> None:
            if future.cancelled():
                return
            report: Callable[[Any], None] = future.set_result
            value: Any
            try:
                value = function(*args)
            except BaseException as error:
                report, value = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(settle, report, value)

        whose = owner.get()
        with self._changed:
            works = self._waiting.setdefault(whose, deque())
            works.append(work)
            if self._idle:
                self._idle -= 1  # here: until that thread runs, another work must not count on it
                self._changed.notify()
            elif len(self._threads) < self._limit:
                thread = threading.Thread(target=self._serve, name="atlas-offload", daemon=True)
                self._threads.append(thread)
                thread.start()
        try:
            return await future
        except asyncio.CancelledError:
            with self._changed, contextlib.suppress(ValueError):  # begun already
                works.remove(work)
            raise

    def _serve(self) -> None:
        while True:
            with self._changed:
                while (turn := self._turn()) is None:
                    self._idle += 1
                    self._changed.wait()
                whose, work = turn
                self._running[whose] += 1
            work()
            del work, turn  # what it was about is not kept until there is more to do
            with self._changed:
                self._running[whose] -= 1
                if not self._running[whose]:
                    del self._running[whose]

    def _turn(self) -> tuple[str, Callable[[], None]] | None:
        """The next work to do, which is taken out; None: there is none that may begin."""
        for whose, works in [*self._waiting.items()]:
            if not works:  # all of it was cancelled
                del self._waiting[whose]
            elif self._running[whose] < self._most:
                self._waiting.move_to_end(whose)
                work = works.popleft()
                if not works:
                    del self._waiting[whose]
                return whose, work
        return None
