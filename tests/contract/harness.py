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

from atlas.build.kernel_file import ROW_MAJOR
from atlas.build.manifest import KernelEntry
from atlas.debug.compare import error_ratio
from atlas.ops import OPS
from atlas.ops.op import Op, Operand
from atlas.runtime import memory_plan
from atlas.runtime.backend import Backend, BoundProgram
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.program import KernelKey, Recorder, StepPrograms
from atlas.runtime.step import PHASE_PREFILL, SYMBOL_OF_DIM, SYMBOLS, Limits, StepBlock, offsets
from atlas.targets import formats
from atlas.targets.expression import evaluate
from atlas.targets.formats import FORMATS
from atlas.weights.layouts import LAYOUTS, Layout
from atlas.weights.quantized import BlockArray, to_rows

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
    backend: Backend,
    kernels: Mapping[str, KernelEntry],
    case: Case,
    given: Mapping[str, Any],
    phase: int = PHASE_PREFILL,
) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None]]:
    """Run `case` on `backend` with inputs `given` (live part of "in" and "inout" operands), in a step of `phase`.

    given: arrays, and a QuantizedArray for an operand in a block format.

    Returns the operands before and after, in logical layout, and a check of the rest of the arena.
    """
    programs, limits = programs_of(case)
    names = layouts_of(kernels, case)
    layout = {name: LAYOUTS[layout] for name, layout in names.items()}
    physical = {name: layout[name].nbytes(case.shape(name), case.dtype(name)) for name in layout}
    plan = memory_plan.plan(programs, limits, physical, memory_plan.scratch_of(programs, kernels))
    bound = BoundProgram(programs.forward, programs.buffers, plan, limits, kernels)

    backend.allocate(plan.total)
    backend.fill(0, POISON, plan.total)
    scratch_begin, scratch_end = plan.regions[memory_plan.SCRATCH]
    if scratch_end > scratch_begin:
        backend.fill(scratch_begin, 0, scratch_end - scratch_begin)
    before: dict[str, Any] = {}
    for operand in case.operands:
        before[operand.name] = poisoned(case, operand.name)
        if operand.name in given:
            _fill(before[operand.name], given[operand.name], case.dtype(operand.name))
            backend.write(plan.offsets[operand.name], _packed(layout[operand.name], case, operand.name, before, given))
    arena = np.empty(plan.total, np.uint8)
    backend.read(0, arena)

    memory = backend.staging(offsets(limits)[1])
    block = StepBlock(memory, limits)
    block.set_symbols({SYMBOL_OF_DIM[dim]: value for dim, value in case.dims})
    block.set_symbols({name: 1 for name in SYMBOLS if name not in {SYMBOL_OF_DIM[d] for d, _ in case.dims}})
    block.set_phase(phase)
    handle = backend.load(bound)
    backend.begin_step(plan.offsets["step.header"], memory, block.used_bytes())
    backend.run(handle, 0, 1)

    arena_after = np.empty(plan.total, np.uint8)
    backend.read(0, arena_after)
    after, untouched = {}, np.ones(plan.total, bool)
    for begin, end in (plan.regions["step"], (scratch_begin, scratch_end)):
        untouched[begin:end] = False
    for operand in case.operands:
        offset, size = plan.offsets[operand.name], physical[operand.name]
        raw = arena_after[offset : offset + size]
        after[operand.name] = layout[operand.name].unpack(raw, case.shape(operand.name), case.dtype(operand.name))
        if operand.mode != "in":
            untouched[offset : offset + size] = False
            if names[operand.name] == "tiles" and operand.mode == "out":
                _check_padding(raw, case, operand.name)

    def check_rest() -> None:
        changed = np.flatnonzero((arena != arena_after) & untouched)
        assert not len(changed), f"{case.op} wrote outside its outputs, first at arena byte {changed[0]}"

    return before, after, check_rest


def layouts_of(kernels: Mapping[str, KernelEntry], case: Case) -> dict[str, str]:
    """The layout of every operand, as the kernel of the case declares it."""
    key = case.key()
    entry = kernels.get(key.name()) or kernels.get(key.signature())
    return {operand.name: (entry.layouts if entry else {}).get(operand.name, ROW_MAJOR) for operand in case.operands}


def poisoned(case: Case, operand: str) -> Any:
    """An operand's whole buffer, spare rows too, full of poison."""
    shape, dtype = case.shape(operand), case.dtype(operand)
    raw = np.full(formats.nbytes(dtype, shape), POISON, np.uint8)
    if dtype in FORMATS:
        return BlockArray(raw, FORMATS[dtype], shape[-1])
    return raw.view(NUMPY[dtype]).reshape(shape)


def _fill(buffer: Any, live: Any, dtype: str) -> None:
    """Put the live part of an operand in its place."""
    if isinstance(buffer, BlockArray):
        rows = to_rows(live, dtype)
        buffer.raw[: len(rows)] = rows
    else:
        buffer[tuple(slice(0, extent) for extent in live.shape)] = live


def _packed(layout: Layout, case: Case, operand: str, before: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """An operand as it lies on the device. What is poison there cannot be of a format with searched scales."""
    dtype = case.dtype(operand)
    if dtype not in FORMATS:
        return layout.pack(before[operand])
    whole = len(given[operand].codes) == case.shape(operand)[0]
    return layout.pack(given[operand] if whole else before[operand].quantized(), dtype)


def _check_padding(raw: Any, case: Case, operand: str) -> None:
    """Columns past the end of a row in `tiles` are zeros: a product multiplies them."""
    dtype, (rows, k) = case.dtype(operand), case.shape(operand, spare=False)
    size = 1 if dtype in FORMATS else NUMPY[dtype].itemsize
    padded = LAYOUTS["tiles"].unpack(raw, (case.shape(operand)[0], -(-k * size // 128) * (128 // size)), dtype)
    rest = padded.raw[:rows, k : padded.k] if isinstance(padded, BlockArray) else padded[:rows, k:].view(f"u{size}")
    assert not rest.any(), f"{case.op}: {operand} has padding columns that are not zeros: {case}"


def _bits(array: Any) -> Any:
    """Rows as bytes."""
    return array.raw if isinstance(array, BlockArray) else array.view(f"u{array.dtype.itemsize}")


def check(
    backend: Backend,
    kernels: Mapping[str, KernelEntry],
    case: Case,
    given: Mapping[str, Any],
    phase: int = PHASE_PREFILL,
) -> float:
    """Assert that the backend agrees with the reference. Returns the largest error over its bound."""
    before, after, check_rest = run(backend, kernels, case, given, phase)
    expected = {name: array.copy() for name, array in before.items()}
    case.contract.reference(expected, dict(case.dims), dict(case.constants))
    names = layouts_of(kernels, case)
    worst = 0.0
    for operand in case.operands:
        name = operand.name
        if operand.mode == "in":
            continue
        # Where rows are stored in blocks, those beyond the run-time count may hold anything.
        live = slice(case.shape(name, spare=False)[0] if LAYOUTS[names[name]].row_granule > 1 else None)
        was, wanted, found = (arrays[name][live] for arrays in (before, expected, after))
        kept = _bits(wanted) == _bits(was)
        assert (~kept | (_bits(found) == _bits(was))).all() or isinstance(wanted, BlockArray), (
            f"{case.op}: {name} was written where the reference leaves it alone: {case}"
        )
        tolerance = case.contract.bound(case.dtype(name), dict(case.key().dtypes))
        if isinstance(wanted, BlockArray):
            rows = case.shape(name, spare=False)[0]
            assert (_bits(found)[rows:] == _bits(was)[rows:]).all(), f"{case.op}: {name} has rows written beyond {rows}"
            ratio = error_ratio(found[:rows].astype(np.float32), wanted[:rows].astype(np.float32), tolerance)
        else:
            ratio = error_ratio(found[~kept], wanted[~kept], tolerance)
        assert ratio <= 1.0, f"{case.op}: {name} is {ratio:.3g} times its tolerance away from the reference: {case}"
        worst = max(worst, ratio)
    check_rest()
    return worst
