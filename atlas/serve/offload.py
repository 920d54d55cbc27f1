"""Daemon threads for work that would stall the event loop.

Not `asyncio.to_thread`: its threads are joined when the interpreter exits, so a tokeniser that is still busy
with one huge prompt (nothing can interrupt it) would hold up a shutdown that promised to be quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Offload:
    """A small pool of daemon threads, started when first used."""

    def __init__(self, threads: int = 2) -> None:
        self._limit = threads
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """The result of `function(*args)`, computed in a thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(setter: Callable[[Any], None], value: Any) -> None:
            if not future.done():  # it is done when its request was cancelled
                setter(value)

        def work() -> None:
            report: Callable[[Any], None] = future.set_result
            value: Any
            try:
                value = function(*args)
            except BaseException as error:
                report, value = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(settle, report, value)

        self._queue.put(work)
        if len(self._threads) < self._limit and self._idle < self._queue.qsize():
            thread = threading.Thread(target=self._serve, name="atlas-offload", daemon=True)
            self._threads.append(thread)
            thread.start()
        return await future

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            work = self._queue.get()
            with self._lock:
                self._idle -= 1
            work()
            del work  # what it was about is not kept until there is more to do
