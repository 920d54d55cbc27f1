"""Weights that the device itself brings into their format and layout, by op `load_rows`.

The build compiles what `keys` names, and the loader runs it: one launch a run of rows, from a slot of staging in the
workspace, which nobody uses while a model is loaded, into the weight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atlas.ops import OPS
from atlas.runtime.program import KernelKey, Launch, Program, StepPrograms

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
    matrices = [b for b in programs.buffers.values() if b.kind == "weight" and len(b.shape) == 2 and b.dtype in FORMATS]
    return list(dict.fromkeys(key(buffer.dtype, int(buffer.shape[1])) for buffer in matrices))


@dataclasses.dataclass(frozen=True)
class Rows:
    """A run of whole rows: k elements of SOURCE each, made `dtype` at arena offset `out`."""

    dtype: str
    k: int
    out: int


def bind(bound: BoundProgram, runs: Sequence[Rows], slots: Sequence[int], fault: int) -> BoundProgram:
    """A program of one launch a run; run i takes its rows from the arena offset `slots[i]`. All say in the word at the
    offset `fault` if rows are not all finite."""
    launches, offsets = [], {"load.fault": fault}
    for i, (run, slot) in enumerate(zip(runs, slots, strict=True)):
        offsets |= {f"load.slot.{i}": slot, f"load.out.{i}": run.out}
        operands = [("x", f"load.slot.{i}"), ("out", f"load.out.{i}")]
        if watched(run.dtype):
            operands.append(("fault", "load.fault"))
        launches.append(Launch(f"load.{i}", key(run.dtype, run.k), tuple(operands), (("rows", "n_rows"),)))
    program, plan = Program("load", tuple(launches)), dataclasses.replace(bound.plan, offsets=offsets)
    return dataclasses.replace(bound, program=program, plan=plan)
