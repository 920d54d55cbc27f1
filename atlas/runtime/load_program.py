"""Weights that the device itself brings into their format and layout, by op `load_rows`.

The build compiles what `keys` names, and the loader runs it: one launch a run of rows, from a slot of staging in the
workspace, which nobody uses while a model is loaded, into the weight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from atlas.ops import OPS
from atlas.runtime.program import Buffer, KernelKey, Launch, Program, StepPrograms

if TYPE_CHECKING:
    from atlas.runtime.backend import BoundProgram

FORMATS = tuple(OPS["load_rows"].operand("out").dtypes)
"""What the device can make of plain rows."""

SOURCE = "bf16"
"""What checkpoints hold; other floats are converted by the host."""


def watched(dtype: str) -> bool:
    """Whether rows made `dtype` must be finite: a scale is no place for what is not."""
    return dtype != SOURCE


def key(dtype: str, k: int) -> KernelKey:
    """The kernel that makes `dtype` of rows of k elements."""
    fault = (("fault", "i32"),) if watched(dtype) else ()
    return KernelKey("load_rows", (("x", SOURCE), ("out", dtype), *fault), (("k", k),))


@functools.cache
def kernel(dtype: str, k: int) -> str:
    """The name of that kernel. A model's weights are thousands of runs with a few of them."""
    return key(dtype, k).name()


def keys(programs: StepPrograms) -> list[KernelKey]:
    """Every kernel that loading a GPU's weights needs."""
    return list(dict.fromkeys(filter(None, (maker(b) for b in programs.buffers.values() if b.kind == "weight"))))


def maker(buffer: Buffer) -> KernelKey | None:
    """The kernel that makes rows of a weight, if there can be one."""
    if len(buffer.shape) != 2 or buffer.dtype not in FORMATS:
        return None
    return key(buffer.dtype, int(buffer.extents({})[1]))


@dataclasses.dataclass(frozen=True)
class Rows:
    """A run of whole rows of a weight, by its number: k elements of SOURCE each, made `dtype` at arena offset `out`."""

    dtype: str
    k: int
    out: int
    weight: int

    def operands(self, slot: int, faults: int) -> list[int | None]:
        """Of its launch: it reads rows at the offset `slot`, and says in its weight's word from the offset `faults` on
        if they are not all finite."""
        return [slot, self.out, faults + 4 * self.weight if watched(self.dtype) else None]


def bind(bound: BoundProgram, weights: Iterable[str], somewhere: int) -> tuple[BoundProgram, dict[str, int]]:
    """A program of one launch for each kernel that there is to make one of the weights, and kernel -> launch.

    somewhere: offset of all operands; each run has its own.
    """
    keys = dict.fromkeys(maker(bound.buffers[name]) for name in weights)
    kernels = {key.name(): key for key in keys if key is not None and key.name() in bound.kernels}
    launches = tuple(
        Launch(f"load.{i}", key, tuple((operand, "load.operand") for operand, _ in key.dtypes), (("rows", "n_rows"),))
        for i, key in enumerate(kernels.values())
    )
    plan = dataclasses.replace(bound.plan, offsets={"load.operand": somewhere})
    program = dataclasses.replace(bound, program=Program("load", launches), plan=plan)
    return program, {name: i for i, name in enumerate(kernels)}
