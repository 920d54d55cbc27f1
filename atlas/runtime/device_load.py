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


class DeviceLoad:
    """Takes runs in order. All methods belong to the thread that calls the backend."""

    def __init__(
        self, backend: Backend, bound: BoundProgram, runs: Sequence[load_program.Rows], slot_bytes: int
    ) -> None:
        """slot_bytes: of the largest run. The workspace must have room for a slot: see `fits`."""
        self._faults, end = bound.plan.regions["workspace"]
        begin, stride = self._faults + _aligned(4 * len(runs)), _aligned(slot_bytes)
        self._slots = [begin + i * stride for i in range(min(SLOTS, (end - begin) // stride, len(runs)))]
        self._backend, self._runs, self._next = backend, runs, 0
        backend.fill(self._faults, 0, 4 * len(runs))
        self._handle = backend.load(load_program.bind(bound, runs, self._slots, self._faults))
        self._header, self._rows = bound.plan.offsets["step.header"], 0
        self._headers: dict[int, memoryview] = {}

    @staticmethod
    def room(bound: BoundProgram) -> int:
        """Bytes of a run with which there are some slots."""
        begin, end = bound.plan.regions["workspace"]
        return (end - begin) // 4

    @staticmethod
    def fits(bound: BoundProgram, runs: int, slot_bytes: int) -> bool:
        """Whether the workspace holds a slot, and a word a run."""
        begin, end = bound.plan.regions["workspace"]
        return end - begin >= _aligned(4 * runs) + _aligned(slot_bytes)

    def send(self, uploads: Uploads, slot: Slot) -> None:
        """Copy the next run's rows and start its launch."""
        index, slots = self._next, len(self._slots)
        self._next += 1
        half = max(1, slots // 2)
        if index >= half and index % half == 0:
            # Whoever had the next slots before is through with them. Not for each run: its copy would wait for the
            # launch right before it, and the link would be idle meanwhile.
            self._backend.order_uploads()
        uploads.send(self._slots[index % slots], slot)
        self._backend.order_runs()
        rows = slot.used // (2 * self._runs[index].k)
        if rows != self._rows:
            self._backend.begin_step(self._header, self._step(rows), 4 * HEADER_WORDS)
            self._rows = rows
        self._backend.run(self._handle, index, index + 1)

    def faulty(self) -> Sequence[int]:
        """Runs with a value that is not finite, of those whose format must not have one. Waits for all runs."""
        words = np.empty(len(self._runs), np.int32)
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
