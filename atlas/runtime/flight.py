"""Steps in flight: the memory that a submitted step needs until the host has its results.

With a backend that works on its own (`cuda`) the host submits a step while the one before runs. Each has a step block
that must stay as it is until the device has copied it, and memory that results are copied into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from atlas.runtime.backend import Array, Backend
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.memory_plan import MemoryPlan
from atlas.runtime.program import Buffer
from atlas.runtime.step import Limits, StepBlock, offsets

TOKENS = ("token",)
LOGPROBS = ("logprob", "rank", "top_token", "top_logprob")
"""Buffers of the sample program that the host reads after a step."""


@dataclasses.dataclass(frozen=True)
class Results:
    """One result buffer's pinned memory: `array` [n_logits limit, ...] is a view of `memory`."""

    memory: memoryview
    array: Array


class Slot:
    """What one step in flight occupies. `memory` is the step block's, `block` the views of its fields."""

    def __init__(self, backend: Backend, plan: MemoryPlan, buffers: Mapping[str, Buffer], limits: Limits) -> None:
        self.memory = backend.staging(offsets(limits)[1])
        self.block = StepBlock(self.memory, limits)
        self._backend, self._plan = backend, plan
        self._results: dict[str, Results] = {}
        for name in (*TOKENS, *LOGPROBS):
            shape, dtype = buffers[name].extents(limits.symbols()), NUMPY[buffers[name].dtype]
            memory = backend.staging(int(np.prod(shape)) * dtype.itemsize)
            array = np.frombuffer(memory, dtype)[: int(np.prod(shape))].reshape(shape)
            self._results[name] = Results(memory, array)

    @property
    def nbytes(self) -> int:
        """Host memory of the slot."""
        return self.block.nbytes + sum(results.array.nbytes for results in self._results.values())

    def read_later(self, name: str, rows: int) -> None:
        """Copy the first `rows` rows of a result once the device has computed them."""
        results = self._results[name]
        self._backend.read_later(self._plan.offsets[name], results.memory[: results.array[:rows].nbytes])

    def result(self, name: str, rows: int) -> Array:
        """What `read_later` has brought. Overwritten by a later step of this slot."""
        return self._results[name].array[:rows]


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A submitted step. ticket: of the backend's fence behind it. rows: its logit rows."""

    slot: Slot
    ticket: int
    rows: int
    logprobs: bool
