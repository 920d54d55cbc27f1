"""Runs one op on one backend and holds it against the op's NumPy reference.

Every byte of the arena is poisoned first: floats are NaN, integers are garbage that would be far out
of range as an index. After the run, what the reference wrote must be close to it, and every other
byte of the arena, gaps between buffers included, must be as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atlas.build.manifest import KernelEntry
from atlas.debug.compare import error_ratio
from atlas.ops import OPS
from atlas.ops.op import Op, Operand
from atlas.runtime import memory_plan
from atlas.runtime.backend import Backend, BoundProgram
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.program import KernelKey, Recorder, StepPrograms
from atlas.runtime.step import SYMBOLS, Limits, StepBlock, offsets
from atlas.targets.expression import evaluate
from atlas.targets.formats import FORMATS
from atlas.weights.layouts import LAYOUTS
from atlas.weights.quantized import BlockArray, to_rows

SYMBOL_OF_DIM = {
    "rows": "n_rows",
    "seqs": "n_seqs",
    "logits": "n_logits",
    "max_blocks": "max_blocks",
    "blocks": "n_blocks",
    "slots": "n_slots",
}

SPARE = 3
"""Rows that a buffer has beyond the run-time count: they must be neither read nor written."""

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

POISON = 0xFF
"""Byte of the poison: NaN as f32 and bf16, -1 as an integer."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One specialisation of an op, and the run-time sizes to run it at.

    dtypes: of operands whose contract accepts several.
    optional: the optional operands that the launch has.
    """

    op: str
    dtypes: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | float], ...]
    dims: tuple[tuple[str, int], ...]
    note: str = ""
    optional: tuple[str, ...] = ()

    @property
    def contract(self) -> Op:
        return OPS[self.op]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.contract.operands if not o.optional or o.name in self.optional)

    def dtype(self, operand: str) -> str:
        accepted = self.contract.operand(operand).dtypes
        return dict(self.dtypes)[operand] if len(accepted) > 1 else accepted[0]

    def key(self) -> KernelKey:
        dtypes = tuple((operand.name, self.dtype(operand.name)) for operand in self.operands)
        given = dict(self.constants)
        return KernelKey(self.op, dtypes, tuple((name, given[name]) for name in self.contract.constants))

    def shape(self, operand: str, spare: bool = True) -> tuple[int, ...]:
        """Extents of an operand's buffer; with `spare`, run-time counts have SPARE more."""
        names = {name: value for name, value in self.constants if isinstance(value, int)}
        for dim, value in self.dims:
            names[dim] = value + (SPARE if spare and SYMBOL_OF_DIM[dim] in ("n_rows", "n_seqs", "n_logits") else 0)
        return tuple(evaluate(extent, names, operand) for extent in self.contract.operand(operand).shape)

    def __str__(self) -> str:
        dtypes = "-".join(dict.fromkeys(dtype for _, dtype in self.dtypes))
        sizes = "-".join(f"{name}{value}" for name, value in (*self.constants, *self.dims))
        return "-".join(part for part in (self.note, dtypes, *self.optional, sizes) if part)


def has_cuda_kernel(case: Case) -> bool:
    """Whether a GPU can run a case: kernels there are of element types, and a product takes one for both factors.

    Block formats, and ops without a `.cu` file, are the CPU's so far.
    """
    ops = {path.stem for path in (KERNELS / "cuda").glob("*.cu")}
    dtypes = dict(case.dtypes)
    formats = any(dtype in FORMATS for dtype in dtypes.values())
    return case.op in ops and not formats and (case.op != "linear" or dtypes["x"] == dtypes["weight"])


def case(
    op: str,
    dtypes: str | Mapping[str, str],
    note: str = "",
    /,
    optional: tuple[str, ...] = (),
    **sizes: int | float,
) -> Case:
    """A case from keyword sizes. `dtypes`: one type for every operand that has a choice, or by operand.
    `optional`: names of the optional operands that it has."""
    contract = OPS[op]
    choices = [
        operand.name
        for operand in contract.operands
        if len(operand.dtypes) > 1 and (not operand.optional or operand.name in optional)
    ]
    given = dict.fromkeys(choices, dtypes) if isinstance(dtypes, str) else dict(dtypes)
    return Case(
        op,
        tuple((name, given[name]) for name in choices),
        tuple((name, sizes[name]) for name in contract.constants),
        tuple((name, int(sizes[name])) for name in contract.dims),
        note,
        optional,
    )


def programs_of(case: Case) -> tuple[StepPrograms, Limits]:
    """A forward program of one launch, every operand a buffer of its own."""
    recorder = Recorder()
    recorder.begin("forward")
    dims = dict(case.dims)
    integers = {name: value for name, value in case.constants if isinstance(value, int)}
    for operand in case.operands:
        extents = tuple(
            SYMBOL_OF_DIM[extent]
            if isinstance(extent, str) and extent in SYMBOL_OF_DIM
            else evaluate(extent, integers, operand.name)
            for extent in operand.shape
        )
        recorder.buffer(operand.name, case.dtype(operand.name), extents, "state")
    recorder.launch(
        case.op,
        case.op,
        {operand.name: operand.name for operand in case.operands},
        {dim: SYMBOL_OF_DIM[dim] for dim in case.contract.dims},
        dict(case.constants),
    )
    recorder.begin("sample")
    symbols = {SYMBOL_OF_DIM[dim]: value for dim, value in dims.items()}
    limits = Limits(
        n_rows=symbols.get("n_rows", 1) + SPARE,
        n_seqs=symbols.get("n_seqs", 1) + SPARE,
        n_logits=symbols.get("n_logits", 1) + SPARE,
        max_blocks=symbols.get("max_blocks", 1),
        n_blocks=symbols.get("n_blocks", 1),
        n_slots=symbols.get("n_slots", 1),
    )
    return recorder.finish(), limits


def run(
    backend: Backend, kernels: Mapping[str, KernelEntry], case: Case, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None]]:
    """Run `case` on `backend` with inputs `given` (live part of "in" and "inout" operands).

    given: arrays, and a QuantizedArray for a weight in a block format.

    Returns the operands before and after, in logical layout, and a check of the rest of the arena.
    """
    programs, limits = programs_of(case)
    launch = programs.forward.launches[0]
    entry = kernels.get(launch.key.name()) or kernels.get(launch.key.signature())
    layout = {o.name: LAYOUTS[(entry.layouts if entry else {}).get(o.name, "row_major")] for o in case.operands}
    physical = {name: layout[name].nbytes(case.shape(name), case.dtype(name)) for name in layout}
    plan = memory_plan.plan(programs, limits, physical)
    bound = BoundProgram(programs.forward, programs.buffers, plan, limits, kernels)

    backend.allocate(plan.total)
    backend.fill(0, POISON, plan.total)
    before: dict[str, Any] = {}
    for operand in case.operands:
        if case.dtype(operand.name) in FORMATS:
            # A weight has no run-time extent, so nothing of it is spare.
            packed = layout[operand.name].pack(given[operand.name], case.dtype(operand.name))
            backend.write(plan.offsets[operand.name], packed)
            rows = to_rows(given[operand.name], case.dtype(operand.name))
            before[operand.name] = BlockArray(rows, FORMATS[case.dtype(operand.name)], case.shape(operand.name)[1])
            continue
        dtype = NUMPY[case.dtype(operand.name)]
        shape = case.shape(operand.name)
        array = np.full(int(np.prod(shape)) * dtype.itemsize, POISON, np.uint8).view(dtype).reshape(shape)
        if operand.name in given:
            live = given[operand.name]
            array[tuple(slice(0, extent) for extent in live.shape)] = live
            backend.write(plan.offsets[operand.name], layout[operand.name].pack(array))
        before[operand.name] = array
    arena = np.empty(plan.total, np.uint8)
    backend.read(0, arena)

    memory = backend.staging(offsets(limits)[1])
    block = StepBlock(memory, limits)
    block.set_symbols({SYMBOL_OF_DIM[dim]: value for dim, value in case.dims})
    block.set_symbols({name: 1 for name in SYMBOLS if name not in {SYMBOL_OF_DIM[d] for d, _ in case.dims}})
    handle = backend.load(bound)
    backend.begin_step(plan.offsets["step.header"], memory, block.used_bytes())
    backend.run(handle, 0, 1)

    arena_after = np.empty(plan.total, np.uint8)
    backend.read(0, arena_after)
    after, untouched = {}, np.ones(plan.total, bool)
    step_begin, step_end = plan.regions["step"]
    untouched[step_begin:step_end] = False
    for operand in case.operands:
        offset, size = plan.offsets[operand.name], physical[operand.name]
        raw = arena_after[offset : offset + size]
        after[operand.name] = layout[operand.name].unpack(raw, case.shape(operand.name), case.dtype(operand.name))
        if operand.mode != "in":
            untouched[offset : offset + size] = False

    def check_rest() -> None:
        changed = np.flatnonzero((arena != arena_after) & untouched)
        assert not len(changed), f"{case.op} wrote outside its outputs, first at arena byte {changed[0]}"

    return before, after, check_rest


def check(backend: Backend, kernels: Mapping[str, KernelEntry], case: Case, given: Mapping[str, Any]) -> float:
    """Assert that the backend agrees with the reference. Returns the largest error over its bound."""
    before, after, check_rest = run(backend, kernels, case, given)
    expected = {name: array if isinstance(array, BlockArray) else array.copy() for name, array in before.items()}
    case.contract.reference(expected, dict(case.dims), dict(case.constants))
    worst = 0.0
    for operand in case.operands:
        name = operand.name
        if operand.mode == "in":
            continue
        dtype = case.dtype(name)
        as_bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[NUMPY[dtype].itemsize]
        kept = expected[name].view(as_bits) == before[name].view(as_bits)
        same = after[name].view(as_bits) == before[name].view(as_bits)
        assert (same | ~kept).all(), f"{case.op}: {name} was written where the reference leaves it alone: {case}"
        ratio = error_ratio(after[name][~kept], expected[name][~kept], case.contract.tolerance[dtype])
        assert ratio <= 1.0, f"{case.op}: {name} is {ratio:.3g} times its tolerance away from the reference: {case}"
        worst = max(worst, ratio)
    check_rest()
    return worst
