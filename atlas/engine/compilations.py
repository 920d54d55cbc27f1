"""Grammars that are being compiled, for sequences that wait for it, in threads beside the steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import perf_counter

from atlas.engine.constraint import Constraint
from atlas.engine.sequence import Sequence
from atlas.errors import RequestError

THREADS = 2
"""A grammar that takes long to compile keeps one other thread for the others."""
SECONDS = 30.0
"""A grammar that takes longer ends its request, and no other waits for its thread. The API process lets none through
that took it five seconds, over a smaller vocabulary."""


class Compilations:
    """`add` and `collect` belong to the step loop's thread. Threads are daemons: no library can stop one, and the
    process must be able to end."""

    def __init__(self, compile_for: Callable[[Sequence], Constraint]) -> None:
        self._compile_for = compile_for
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, float] = {}  # since when
        self._results: SimpleQueue[tuple[Sequence, Constraint | BaseException]] = SimpleQueue()
        self._ready: list[tuple[Sequence, Constraint | BaseException]] = []
        self._wanted: set[Sequence] = set()

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._wanted)

    def add(self, sequence: Sequence) -> None:
        """Compile its grammar as soon as a thread is free."""
        self._wanted.add(sequence)
        self._waiting.append(sequence)
        self._start()

    def drop(self, sequence: Sequence) -> bool:
        """It waits no more. False: it did not. What has begun is not stopped."""
        if sequence not in self._wanted:
            return False
        self._wanted.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        return True

    def wait(self, seconds: float) -> None:
        """Until there may be something to collect, at most so long."""
        try:
            self._ready.append(self._results.get(timeout=seconds))
        except Empty:
            return

    def collect(self) -> list[tuple[Sequence, Constraint | BaseException]]:
        """The sequences that wait no more, each with its constraint at the beginning or with what went wrong."""
        while not self._results.empty():
            self._ready.append(self._results.get())
        ready, self._ready = self._ready, []
        for sequence, _ in ready:
            self._running.pop(sequence, None)
        late = perf_counter() - SECONDS
        for sequence in [sequence for sequence, since in self._running.items() if since < late]:
            del self._running[sequence]  # the thread goes on, but its place is free
            found = f"not compiled after {SECONDS:g} s"
            ready.append((sequence, RequestError("grammar", found, "a simpler one")))
        self._start()
        told = [(sequence, result) for sequence, result in ready if sequence in self._wanted]
        self._wanted.difference_update(sequence for sequence, _ in told)
        return told

    def _start(self) -> None:
        while self._waiting and len(self._running) < THREADS:
            sequence = self._waiting.popleft()
            self._running[sequence] = perf_counter()
            threading.Thread(target=self._work, args=(sequence,), name="atlas-grammar", daemon=True).start()

    def _work(self, sequence: Sequence) -> None:
        result: Constraint | BaseException
        try:
            result = self._compile_for(sequence)
        except BaseException as fault:  # a panic of the library is no Exception
            result = fault
        self._results.put((sequence, result))
