"""What a kernel is tuned on: a program of its launches, their buffers on the device, and what its outputs must be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas.build.kernel_file import ROW_MAJOR
from atlas.build.tune_inputs import CONTEXT, inputs
from atlas.ops import OPS
from atlas.runtime import memory_plan
from atlas.runtime.backend import Array, Backend
from atlas.runtime.memory_plan import MemoryPlan
from atlas.runtime.program import KernelKey, Recorder, StepPrograms
from atlas.runtime.step import SYMBOL_OF_DIM, Limits, StepBlock
from atlas.targets import formats
from atlas.targets.expression import evaluate
from atlas.targets.shape import KV_BLOCK_SIZE
from atlas.weights.layouts import LAYOUTS
from atlas.weights.quantized import BlockArray

PER_ROW = ("rows", "seqs", "logits")
"""Dims that a case sets to its number of rows."""
ROTATES = {"linear": "weight", "gated_linear": "weight", "paged_attention": "block_table"}
"""Op -> the operand whose copies launches take turns over: what decides which memory is read."""
CACHE_BYTES = 128 << 20
"""More than twice any L2 cache: copies add up to this."""
COPIES = 192
LAUNCHES = 192
"""Fewest launches of a program; a whole number of turns over the copies."""
POISON = 0xFF
SPARE = 3


@dataclasses.dataclass
class Bench:
    """One kernel's buffers on the device, and what its outputs must be."""

    key: KernelKey
    programs: StepPrograms
    limits: Limits
    plan: MemoryPlan
    physical: Mapping[str, int]
    arrays: Mapping[str, Any]
    copies: int
    layouts: Mapping[str, str]
    phase: int
    inout: dict[str, Array] = dataclasses.field(default_factory=dict)
    """Operands that a run changes, as they lie on the device before it."""


def plan(key: KernelKey, rows: int, layouts: Mapping[str, str], phase: int, scratch: Mapping[str, int]) -> Bench:
    """Buffers for `rows` rows and SPARE more, a program over them, and the arena's plan."""
    contract = OPS[key.op]
    max_blocks = CONTEXT // KV_BLOCK_SIZE
    n = rows + SPARE
    limits = Limits(n_rows=n, n_seqs=n, n_logits=n, max_blocks=max_blocks, n_blocks=rows * max_blocks, n_slots=1)
    names = {name: value for name, value in key.constants if isinstance(value, int)}
    dims = {dim: limits.symbols()[SYMBOL_OF_DIM[dim]] for dim in contract.dims}
    dtypes = dict(key.dtypes)
    physical: dict[str, int] = {}
    recorder = Recorder()
    recorder.begin("forward")
    operands = [operand for operand in contract.operands if operand.name in dtypes]
    shapes = {o.name: tuple(evaluate(e, {**names, **dims}, o.name) for e in o.shape) for o in operands}
    sizes = {o.name: LAYOUTS[layouts.get(o.name, "row_major")].nbytes(shapes[o.name], dtypes[o.name]) for o in operands}
    rotated = ROTATES.get(key.op)
    copies = 1
    if rotated == "block_table":
        copies = COPIES  # each names other blocks of the one big pool
    elif rotated:
        copies = min(COPIES, max(1, math.ceil(CACHE_BYTES / sizes[rotated])))
    buffers: dict[str, list[str]] = {}
    for operand in operands:
        extents = tuple(
            SYMBOL_OF_DIM[e]
            if isinstance(e, str) and e in SYMBOL_OF_DIM and e in contract.dims
            else evaluate(e, names, operand.name)
            for e in operand.shape
        )
        own = [f"{operand.name}.{i}" for i in range(copies if operand.name == rotated else 1)]
        buffers[operand.name] = own
        for name in own:
            recorder.buffer(name, dtypes[operand.name], extents, "state")
            physical[name] = sizes[operand.name]
    launches = copies * math.ceil(LAUNCHES / copies)
    for i in range(launches):
        recorder.launch(
            key.op,
            f"{key.op}.{i}",
            {name: own[i % len(own)] for name, own in buffers.items()},
            {dim: SYMBOL_OF_DIM[dim] for dim in contract.dims},
            dict(key.constants),
        )
    recorder.begin("sample")
    programs = recorder.finish()
    arena = memory_plan.plan(programs, limits, physical, scratch)
    return Bench(key, programs, limits, arena, physical, {}, copies, layouts, phase)


def fill(backend: Backend, bench: Bench, rows: int) -> None:
    """Make inputs and the reference's outputs, and put the inputs on the device."""
    contract, dtypes = OPS[bench.key.op], dict(bench.key.dtypes)
    rng = np.random.default_rng()
    symbols = bench.limits.symbols()
    arrays: dict[str, Any] = {}
    operands = [operand for operand in contract.operands if operand.name in dtypes]
    for operand in operands:
        dtype, shape = dtypes[operand.name], bench.programs.buffers[f"{operand.name}.0"].extents(symbols)
        raw = np.full(formats.nbytes(dtype, shape), POISON, np.uint8)
        arrays[operand.name] = LAYOUTS[ROW_MAJOR].unpack(raw, shape, dtype)
    inputs(bench.key, arrays, rows, rng)
    for operand in operands:
        if operand.mode == "out":
            continue
        layout = LAYOUTS[bench.layouts.get(operand.name, "row_major")]
        name, array = operand.name, arrays[operand.name]
        packed = layout.pack(array.quantized() if isinstance(array, BlockArray) else array, dtypes[name])
        turns = bench.copies if ROTATES.get(bench.key.op) == name else 1
        for i in range(turns):
            if name == "block_table" and i > 0:
                packed = np.ascontiguousarray(rng.permutation(array.reshape(-1)).reshape(array.shape))
            backend.write(bench.plan.offsets[f"{name}.{i}"], packed)
        if operand.mode == "inout":
            bench.inout[name] = np.array(packed)
    dims = {dim: rows if dim in PER_ROW else symbols[SYMBOL_OF_DIM[dim]] for dim in contract.dims}
    contract.reference(arrays, dims, dict(bench.key.constants))
    bench.arrays = arrays


def begin(backend: Backend, bench: Bench, block: StepBlock, memory: memoryview, rows: int) -> None:
    """Tell the device that the step has `rows` rows, sequences and logits."""
    block.set_symbols({"n_rows": rows, "n_seqs": rows, "n_logits": rows})
    block.set_phase(bench.phase)
    backend.begin_step(bench.plan.offsets["step.header"], memory, block.used_bytes())
