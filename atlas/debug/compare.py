"""Compares a backend with the ops' references, launch by launch and buffer by buffer, and names the first op
that diverges.

The reference of each launch gets the buffers that the launch reads from the backend under test, so that every op is
judged on its own inputs: an error is reported where it arises, not where it ends up. Only weights come from a runner
of their own, which loaded the same checkpoint.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from atlas.ops.op import EXACT, Tolerance
from atlas.runtime.backend import Array
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.program import Launch
from atlas.runtime.runner import Runner


@dataclasses.dataclass(frozen=True)
class Difference:
    """One output buffer of one launch. ratio: largest error as a fraction of the op's tolerance."""

    launch: str
    op: str
    buffer: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.launch} (op {self.op}), buffer {self.buffer}: {self.ratio:.3g} times the op's tolerance"


def compare(runner: Runner, reference: Runner) -> list[Difference]:
    """Run the step that `runner.block` describes and compare every output of every launch with its reference's.

    `reference` holds the weights, in any layout; its programs may have other launches.
    """
    symbols = runner.block.symbols()
    # Padding of the step's arrays is garbage by contract; compare only what the step uses.
    results = []
    for program, launches in (
        ("forward", runner.forward_program.launches),
        ("sample", runner.sample_program.launches),
    ):
        runner.backend.begin_step(runner.plan.offsets["step.header"], runner.step_memory, runner.block.used_bytes())
        for index, launch in enumerate(launches):
            if not launch.is_made(runner.block.phase):
                continue
            arrays = {
                operand: (reference if runner.buffers[name].kind == "weight" else runner).stored(name)
                for operand, name in launch.operands
            }
            dims = {dim: symbols[symbol] for dim, symbol in launch.dims}
            launch.op.reference(arrays, dims, dict(launch.key.constants))
            runner.run_launch(program, index)
            for operand, name in launch.operands:
                if launch.op.operand(operand).mode == "in":
                    continue
                dtype, count = runner.buffers[name].dtype, _live_rows(launch, name, runner, symbols)
                expected = arrays[operand].astype(NUMPY.get(dtype, np.float32))
                tolerance = launch.op.bound(dtype, dict(launch.key.dtypes))
                ratio = error_ratio(runner.read(name)[:count], expected[:count], tolerance)
                results.append(Difference(launch.name, launch.key.op, name, ratio))
    return results


def _live_rows(launch: Launch, name: str, runner: Runner, symbols: dict[str, int]) -> int:
    """Leading extent of the buffer that this step uses; the whole of caches and tables."""
    extent = runner.buffers[name].shape[0]
    if isinstance(extent, str) and extent in symbols:
        return symbols[extent]
    return int(extent)


def error_ratio(actual: Array, expected: Array, tolerance: Tolerance) -> float:
    """Largest |actual - expected| over the tolerance's bound; infinity on a NaN, on infinities that differ and on any
    difference where the op is exact."""
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(e)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[~finite], e[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = np.abs(a[finite] - e[finite])
    if tolerance == EXACT:
        return float("inf") if difference.any() else 0.0
    return float((difference / np.maximum(tolerance.allowed(e[finite]), 1e-30)).max())
