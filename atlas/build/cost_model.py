"""Chooses knobs at build time where nothing was measured: an estimate from shape and hardware facts.

A kernel with choices says beside its source what one block costs (`[cost]`):

- `bytes`: what it moves from memory or the L2 cache; `flops`: what it computes;
- `trips`: memory round trips that wait for one another; `steps`: barriers it passes;
- `memory`: what the whole launch reads from memory at least, whatever the choice.

(`launch`, what a launch of a variant's bound costs in all, takes the place of these.)

A launch is then waves of blocks over the multiprocessors. A wave lasts as long as its slowest limit:
the chain of latencies through one block, or the bytes or flops of the blocks that share a
multiprocessor. The model ranks choices; it does not predict times. docs/kernels/ledger.md says how its
ranking compares with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from atlas.build.geometry import Axis
from atlas.build.kernel_file import COST_OF_LAUNCH, COSTS, Declaration
from atlas.targets.expression import evaluate
from atlas.targets.hardware import Hardware

ROWS: Mapping[int, float] = {1: 0.4, 8: 0.25, 32: 0.2, 128: 0.1, 512: 0.05}
"""Rows of a step -> weight. One kernel serves every batch size, so a choice is judged over all of them;
decode steps, 1 to 32 rows, are nearly all of the steps that a server runs."""

PREFILL_ROWS: Mapping[int, float] = {128: 0.2, 1024: 0.3, 8192: 0.5}
"""The same where a kernel serves prompts alone: short ones, and chunks of long ones."""

LATENCY_US = 0.75
"""A round trip to memory, measured on Hopper-class parts by others as 0.6 to 0.8 us under light load."""
STEP_US = 0.08
"""A barrier and the shared-memory traffic of one step of a tile."""
WARP_STEP_US = 0.01
"""Extra for each warp that a step's barrier waits for."""
FLOPS_PER_WARP = 3.6e5
"""Flops per microsecond of one warp by itself: an mma.m16n8k16 with its fragment loads every 20 cycles."""
FLOPS_PER_MULTIPROCESSOR = 1.5e6
"""Tensor-core flops per microsecond that mma.sync with fragments from shared memory reaches."""
BYTES_PER_MULTIPROCESSOR = 32e3
"""Bytes per microsecond that one multiprocessor draws (H200: 4.2 TB/s over 132)."""
L2_SPEEDUP = 2.0
"""How much faster the L2 cache delivers than memory."""
THREADS_PER_MULTIPROCESSOR = 1536
BLOCKS_PER_MULTIPROCESSOR = 16
RESERVED_SHARED = 1024
"""Shared memory that the system keeps per block."""


def best(
    declared: Declaration, names: Mapping[str, int], hardware: Hardware, candidates: Sequence[Mapping[str, int]]
) -> dict[str, int]:
    """The candidate with the lowest weighted sum; among equals the declared one, then the first."""
    costs = relative(declared, names, hardware, candidates)
    order = sorted(
        range(len(candidates)),
        key=lambda i: (round(costs[i], 6), dict(candidates[i]) != declared.knobs(names), i),
    )
    return dict(candidates[order[0]])


def relative(
    declared: Declaration, names: Mapping[str, int], hardware: Hardware, candidates: Sequence[Mapping[str, int]]
) -> list[float]:
    """Per candidate: the sum over ROWS of weight x estimated time relative to the declared knobs' time; or, where the
    declaration states the cost of a launch, that, relative to the declared knobs'."""
    if COST_OF_LAUNCH in declared.cost:
        stated, whole = declared.knobs(names), declared.cost[COST_OF_LAUNCH]
        first, *others = (evaluate(whole, {**names, **knobs}, str(declared.path)) for knobs in (stated, *candidates))
        return [cost / first if first else 1.0 for cost in others]
    weights = rows_of(declared.phase, names.get("max_rows", 0))
    base = microseconds(declared, names, hardware, declared.knobs(names), tuple(weights))
    result = []
    for knobs in candidates:
        times = microseconds(declared, names, hardware, knobs, tuple(weights))
        result.append(sum(w * t / b for w, t, b in zip(weights.values(), times, base, strict=True)))
    return result


def rows_of(phase: str, max_rows: int) -> Mapping[int, float]:
    """Rows of a step -> weight, for a variant: its bound, a prompt's chunks, or all."""
    if max_rows:
        return {max_rows: 1.0}
    return PREFILL_ROWS if phase == "prefill" else ROWS


def microseconds(
    declared: Declaration,
    names: Mapping[str, int],
    hardware: Hardware,
    knobs: Mapping[str, int],
    rows: Sequence[int],
) -> list[float]:
    """Estimated time of one launch at each number of rows; every run-time dim counts as that number."""
    known = {**names, **knobs}
    where = str(declared.path)
    cost = {key: evaluate(declared.cost.get(key, 0), known, where) for key in COSTS}
    geometry = declared.geometry(names, knobs)
    grid, threads, shared = geometry.grid, geometry.block, geometry.shared
    resident = min(
        BLOCKS_PER_MULTIPROCESSOR,
        max(1, THREADS_PER_MULTIPROCESSOR // threads),
        max(1, hardware.shared_memory_per_block // (shared + RESERVED_SHARED)),
    )
    multiprocessors = hardware.multiprocessors
    warps = threads // 32
    latency = cost["trips"] * LATENCY_US + cost["steps"] * (STEP_US + warps * WARP_STEP_US)
    latency += cost["flops"] / (warps * FLOPS_PER_WARP)

    def wave(count: int) -> float:
        """Time of `count` blocks that run at once."""
        together = -(-count // multiprocessors)
        return max(
            latency,
            together * cost["bytes"] / (BYTES_PER_MULTIPROCESSOR * L2_SPEEDUP),
            together * cost["flops"] / FLOPS_PER_MULTIPROCESSOR,
        )

    at_once = multiprocessors * resident
    result = []
    for count in rows:
        blocks = math.prod(_extent(axis, count) for axis in grid)
        time = blocks // at_once * wave(at_once) + (wave(blocks % at_once) if blocks % at_once else 0.0)
        result.append(max(time, cost["memory"] / (BYTES_PER_MULTIPROCESSOR * multiprocessors)))
    return result


def _extent(axis: Axis, rows: int) -> int:
    return axis.multiplier * (-(-rows // axis.divisor) if axis.dim >= 0 else 1)
