"""Runs the load program (atlas/runtime/load_program.py): rows arrive in slots, the device makes weights of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from atlas.runtime import load_program
from atlas.runtime.backend import Backend, BoundProgram
from atlas.runtime.memory_plan import ALIGNMENT
from atlas.runtime.step import HEADER_WORDS, STEP_VERSION, SYMBOLS
from atlas.runtime.uploads import Slot, Uploads

SLOTS = 16
"""Staging slots on the device, at most."""
LEAST_SLOTS = 4
"""Where the workspace is small, runs are."""


class DeviceLoad:
    """Takes runs in order. All methods belong to the thread that calls the backend.

    slot_bytes: of a run, at most; 0 where the workspace has no room.
    """

    def __init__(self, backend: Backend, bound: BoundProgram, weights: int, most_bytes: int) -> None:
        """weights: how many there are.  most_bytes: of a run of any."""
        self._faults, end = bound.plan.regions["workspace"]
        begin = self._faults + _aligned(4 * weights)
        self.slot_bytes = max(0, min(_aligned(most_bytes), (end - begin) // LEAST_SLOTS // ALIGNMENT * ALIGNMENT))
        count = min(SLOTS, (end - begin) // self.slot_bytes) if self.slot_bytes else 0
        self._slots = [begin + i * self.slot_bytes for i in range(count)]
        self._backend, self._bound, self._weights = backend, bound, weights
        if self._slots:
            backend.fill(self._faults, 0, 4 * weights)
        self._launches: deque[tuple[int, int, load_program.Rows]] = deque()
        self._expected = self._sent = self._rows = 0
        self._header = bound.plan.offsets["step.header"]
        self._headers: dict[int, memoryview] = {}

    def expect(self, weight: int, runs: Sequence[load_program.Rows]) -> None:
        """Load what makes the next runs, of the weight of that number: while others are being read."""
        slots = [self._slots[(self._expected + i) % len(self._slots)] for i in range(len(runs))]
        handle = self._backend.load(load_program.bind(self._bound, runs, slots, self._faults + 4 * weight))
        self._launches += [(handle, i, run) for i, run in enumerate(runs)]
        self._expected += len(runs)

    def send(self, uploads: Uploads, slot: Slot) -> None:
        """Copy the next run's rows and start its launch."""
        handle, index, run = self._launches.popleft()
        half = max(1, len(self._slots) // 2)
        if self._sent >= half and self._sent % half == 0:
            # Whoever had the next slots before is through with them. Not for each run: its copy would wait for the
            # launch right before it, and the link would be idle meanwhile.
            self._backend.order_uploads()
        uploads.send(self._slots[self._sent % len(self._slots)], slot)
        self._backend.order_runs()
        rows = slot.used // (2 * run.k)
        if rows != self._rows:
            self._backend.begin_step(self._header, self._step(rows), 4 * HEADER_WORDS)
            self._rows = rows
        self._backend.run(handle, index, index + 1)
        self._sent += 1

    def faulty(self) -> Sequence[int]:
        """Weights with a value that is not finite, of those whose format must not have one. Waits for all runs."""
        if not self._sent:
            return ()
        words = np.empty(self._weights, np.int32)
        self._backend.synchronize()
        self._backend.read(self._faults, words)
        return [int(i) for i in np.flatnonzero(words)]

    def _step(self, rows: int) -> memoryview:
        """A step header that says so many rows; one for each number, never written again."""
        if rows not in self._headers:
            memory = self._backend.staging(4 * HEADER_WORDS)
            words = np.frombuffer(memory, np.int32)
            words[:HEADER_WORDS] = 0
            words[0], words[1 + SYMBOLS.index("n_rows")] = STEP_VERSION, rows
            self._headers[rows] = memory
        return self._headers[rows]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
