"""Runs the load program (atlas/runtime/load_program.py): rows arrive in slots, the device makes weights of them."""

from __future__ import annotations

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

    slot_bytes: of a run, at most; 0 where the device makes nothing, or the workspace has no room.
    """

    def __init__(self, backend: Backend, bound: BoundProgram, weights: Sequence[str], most_bytes: int) -> None:
        """most_bytes: of a run of any of the weights."""
        self._faults, end = bound.plan.regions["workspace"]
        program, self._launch = load_program.bind(bound, weights, self._faults)
        begin = self._faults + _aligned(4 * len(weights))
        room = (end - begin) // LEAST_SLOTS // ALIGNMENT * ALIGNMENT if self._launch else 0
        self.slot_bytes = max(0, min(_aligned(most_bytes), room))
        count = min(SLOTS, (end - begin) // self.slot_bytes) if self.slot_bytes else 0
        self._slots = [begin + i * self.slot_bytes for i in range(count)]
        self._backend, self._weights, self._sent, self._rows = backend, len(weights), 0, 0
        if self._slots:
            backend.fill(self._faults, 0, 4 * len(weights))
            self._handle = backend.load(program)
        self._header = bound.plan.offsets["step.header"]
        self._headers: dict[int, memoryview] = {}

    def send(self, uploads: Uploads, slot: Slot, run: load_program.Rows) -> None:
        """Copy a run's rows and start its launch."""
        half = max(1, len(self._slots) // 2)
        if self._sent >= half and self._sent % half == 0:
            # Whoever had the next slots before is through with them. Not for each run: its copy would wait for the
            # launch right before it, and the link would be idle meanwhile.
            self._backend.order_uploads()
        place = self._slots[self._sent % len(self._slots)]
        uploads.send(place, slot)
        self._backend.order_runs()
        rows = slot.used // (2 * run.k)
        if rows != self._rows:
            self._backend.begin_step(self._header, self._step(rows), 4 * HEADER_WORDS)
            self._rows = rows
        launch = self._launch[load_program.kernel(run.dtype, run.k)]
        self._backend.run_on(self._handle, launch, run.operands(place, self._faults))
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
