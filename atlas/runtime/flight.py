"""Steps in flight: the memory that a submitted step needs until the host has its results.

With a backend that works on its own (`cuda`) the host submits a step while the one before runs. Each has a step block
that must stay as it is until the device has copied it, and memory that results are copied into.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from atlas.models.sampling import ON_REQUEST
from atlas.runtime.backend import Array, Backend, BoundProgram
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.program import Program
from atlas.runtime.step import StepBlock, offsets

TOKENS = ("token",)
LOGPROBS = ("logprob", "rank", "top_token", "top_logprob")
"""Buffers of the sample program that the host reads after a step."""
MASK = "logit_mask"
"""The one that it writes before."""
_SLOT_ROWS = 4
"""Requests with a bias or penalties that may begin while one step runs, without the host waiting for it. A row has a
word for each token of the vocabulary: half a MB."""


@dataclasses.dataclass(frozen=True)
class Pinned:
    """Pinned memory for one buffer of the device: `array` [n_logits limit, ...] is a view of `memory`."""

    memory: memoryview
    array: Array


@dataclasses.dataclass(frozen=True)
class Step:
    """A loaded program of so many launches."""

    handle: int
    launches: int


class Place:
    """A place on the device for a step's block and results, and the programs loaded for it: `forward` and `sample`, and
    where graphs are made both as one, `plain`, for steps that ask for nothing of ON_REQUEST."""

    def __init__(self, backend: Backend, forward: BoundProgram, sample: BoundProgram, index: int, graphs: bool) -> None:
        self.plan = forward.plan.at(index)
        here = [dataclasses.replace(program, plan=self.plan) for program in (forward, sample)]
        self.forward, self.sample = map(backend.load, here)
        self.plain: Step | None = None
        if graphs:
            launches = forward.program.launches + sample.program.launches
            plain = tuple(launch for launch in launches if launch.key.op not in ON_REQUEST)
            program = dataclasses.replace(here[0], program=Program("step", plain))
            self.plain = Step(backend.load(program), len(plain))


class Slot:
    """What one step in flight occupies. `memory` is the step block's, `block` the views of its fields."""

    def __init__(self, backend: Backend, place: Place, bound: BoundProgram) -> None:
        """`bound`: one of the programs, for its buffers and limits."""
        limits = bound.limits
        self.place = place
        self.memory = backend.staging(offsets(limits)[1])
        self.block = StepBlock(self.memory, limits)
        self._backend, self._bound = backend, bound
        self._pinned = {name: self._pin(name) for name in (*TOKENS, *LOGPROBS, MASK)}

    def _pin(self, name: str) -> Pinned:
        buffer = self._bound.buffers[name]
        shape, dtype = buffer.extents(self._bound.limits.symbols()), NUMPY[buffer.dtype]
        memory = self._backend.staging(int(np.prod(shape)) * dtype.itemsize)
        return Pinned(memory, np.frombuffer(memory, dtype)[: int(np.prod(shape))].reshape(shape))

    @property
    def nbytes(self) -> int:
        """Host memory of the slot."""
        return self.block.nbytes + sum(pinned.array.nbytes for pinned in self._pinned.values())

    def deliver(self, masks: Sequence[Array] | Array) -> None:
        """Copy masks to where the step finds them. Runs from now on wait for them."""
        pinned = self._pinned[MASK]
        pinned.array[: len(masks)] = masks
        self._backend.upload(self.place.plan.offsets[MASK], pinned.memory[: pinned.array[: len(masks)].nbytes])
        self._backend.order_runs()

    def read_later(self, name: str, rows: int) -> None:
        """Copy the first `rows` rows of a buffer once the device has computed them. Memory for any that is no result is
        taken when it is first asked for."""
        if name not in self._pinned:
            self._pinned[name] = self._pin(name)
        pinned = self._pinned[name]
        self._backend.read_later(self.place.plan.offsets[name], pinned.memory[: pinned.array[:rows].nbytes])

    def result(self, name: str, rows: int) -> Array:
        """What `read_later` has brought. Overwritten by a later step of this slot."""
        return self._pinned[name].array[:rows]


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A submitted step. ticket: of the backend's fence behind it. rows: its logit rows."""

    slot: Slot
    ticket: int
    rows: int
    logprobs: bool


class SlotRows:
    """A few rows of pinned memory, in turn: rows of per-slot state on their way to the device between two steps."""

    def __init__(self, backend: Backend, row_bytes: int) -> None:
        self._backend = backend
        self._rows = deque((backend.staging(row_bytes), backend.fence()) for _ in range(_SLOT_ROWS))
        self.nbytes = _SLOT_ROWS * row_bytes

    def send(self, offset: int, row: Array) -> None:
        """Copy a row to `offset` of the arena behind the runs so far and before those that follow."""
        memory, ticket = self._rows.popleft()
        self._backend.wait(ticket)  # long past, unless many requests begin at once
        np.frombuffer(memory, row.dtype)[: row.size] = row
        self._backend.order_uploads()
        ticket = self._backend.upload(offset, memory[: row.nbytes])
        self._backend.order_runs()
        self._rows.append((memory, ticket))
