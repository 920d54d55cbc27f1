"""A kernel file's declaration: launch geometry, knobs, limits and layouts, written beside the kernel.

A file is called `<op>.cu` if it serves both phases of a step, `<op>.prefill.cu` or `<op>.decode.cu` if it serves one
(atlas/runtime/step.py); a word of choice may stand between, `linear.w4.decode.cu`. It opens with a comment that begins
`/* atlas` and holds TOML:

    /* atlas
    [launch]
    grid = ["ceil_div(rows, TILE_M)", "ceil_div(n, TILE_N)", 1]
    block = 128
    shared = 0
    cluster = 1
    pdl = true
    [rows]
    up_to = [8, 16, 32]
    [serves]
    weight = ["bf16"]
    [limits]
    spills = 0
    [knobs]
    TILE_M = 16
    legal = ["TILE_M * 128 <= shared_memory_per_block"]
    [knobs.choices]
    TILE_M = [16, 32, 64]
    [cost]
    bytes = "TILE_M * k * size_x"
    [layouts]
    weight = "panel16"
    */

A grid axis is an integer expression over constants and knobs, or has exactly one run-time dim, as
`dim`, `ceil_div(dim, E)` or a product of one of these with an integer expression. Expressions have + - * // %,
`ceil_div`, `min` and `max` (atlas/targets/expression.py). They know the op's constants, the knobs, `max_rows` of the
variant (0: any number), `multiprocessors`, `shared_memory_per_block`, `cluster_blocks` and `compute_capability`
(10 times the major number and the minor) of the hardware, and `size_<operand>`, bytes of an operand's element (0 of a
block format).

A line `like = "<op>.decode.cu"` before the tables takes every key that they do not state from the file of that name in
the same folder, which is not like another one itself.

A layout is one of LAYOUT_NAMES (atlas/weights/layouts.py), or a name to which HARDWARE.toml gives one, or a table of
these by dtype: `{ bf16 = "tiles", other = "row_major" }`. All kernels that touch a buffer must agree.

`[rows] up_to` makes one variant of the kernel for each bound; a launch takes the smallest that holds its rows. They,
and a file's two phases, must agree in their layouts; a phase's variants also in every bit of a row's result.

| table | key | meaning |
| --- | --- | --- |
| launch | grid, block, shared | launch geometry; dynamic shared memory in bytes |
| launch | cluster | blocks of a cluster, along x; 1 if absent |
| launch | pdl | true: it may start before its predecessor has ended (kernels/cuda/include/atlas/pdl.cuh) |
| launch | cooperative | true: all blocks must be resident together |
| launch | arguments | constants that are arguments, behind the dims: one image serves all their values |
| launch | resident | blocks of a multiprocessor for which a thread's registers must suffice; 1 if absent |
| rows | up_to | most rows of each variant, ascending; a last 0 stands for any number |
| serves | OPERAND | element types and formats of it that this file is for; all if absent |
| serves | where | comparisons of constants and `size_<operand>` that hold for all that this file is for |
| scratch | bytes | device memory of the kernel's own, zero at load, its last argument; none if absent |
| limits | spills | bytes of register spills allowed; 0 if absent |
| limits | seconds | processor time that compiling may take; 30 if absent |
| limits | unread | inputs that this kernel has no need to read |
| limits | same_bits | true: every choice of knobs gives the same bits, and tuning holds it to that |
| knobs | NAME | the declared value, or an expression that gives it (knobs above it may occur) |
| knobs | legal | comparisons that a choice must satisfy |
| knobs.choices | NAME | values to choose from, by tuning or by the cost model |
| cost | bytes, flops, trips, steps, memory | what a block costs, for the cost model (atlas/build/cost_model.py) |
| cost | launch | instead: what a whole launch of the variant's bound costs, in any unit; the least is chosen |
| layouts | OPERAND | its storage layout (see below) |
| levels | also | CPU: instruction-set levels that are compiled on request, for which this file has code of its own |
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas.build.declaration_text import tables
from atlas.build.geometry import Geometry, axis
from atlas.errors import BuildError
from atlas.ops import OPS
from atlas.targets.expression import comparison, evaluate, holds
from atlas.targets.quant import DTYPE_BYTES

_CPU_KERNEL = re.compile(r"^ATLAS_CPU_KERNEL\(\s*\"([\w.]+)\"", re.MULTILINE)
COSTS = ("bytes", "flops", "trips", "steps", "memory")
COST_OF_LAUNCH = "launch"
_TABLES: dict[str, tuple[str, ...] | None] = {
    "launch": ("grid", "block", "shared", "cluster", "pdl", "cooperative", "resident", "arguments"),
    "rows": ("up_to",),
    "serves": None,
    "scratch": ("bytes",),
    "limits": ("spills", "seconds", "unread", "same_bits"),
    "knobs": None,
    "layouts": None,
    "levels": ("also",),
    "cost": (*COSTS, COST_OF_LAUNCH),
}
DEFAULT_SECONDS = 30
ROW_MAJOR, OTHER = "row_major", "other"
LAYOUT_NAMES = (ROW_MAJOR, "panel16", "tiles", "tiles_paired", "kv_tiles", "frag4", "frag4_paired")
"""Of atlas/weights/layouts.py, which needs NumPy, so that a build environment cannot ask it; a test compares them."""

PHASES = ("prefill", "decode")
"""Of a step, as they stand in file names. Their numbers in a manifest are 1 and 2; 0 is a file for both."""


def phase_number(phase: str) -> int:
    """Of a phase, or of "" for both."""
    return PHASES.index(phase) + 1 if phase else 0


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a kernel file says about itself. phase: "" if it serves both."""

    path: Path
    op: str
    grid: tuple[str | int, ...]
    block: str | int
    shared: str | int
    spills: int
    stated_knobs: Mapping[str, str | int]
    layouts: Mapping[str, str | Mapping[str, str]]
    choices: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    legal: tuple[str, ...] = ()
    cost: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    seconds: float = DEFAULT_SECONDS
    unread: tuple[str, ...] = ()
    same_bits: bool = False
    also: tuple[str, ...] = ()
    phase: str = ""
    up_to: tuple[int, ...] = ()
    cluster: str | int = 1
    pdl: bool = False
    cooperative: bool = False
    scratch: str | int = 0
    resident: str | int = 1
    arguments: tuple[str, ...] = ()

    def knobs(self, names: Mapping[str, int]) -> dict[str, int]:
        """The declared value of each knob, for these constants and hardware facts."""
        values: dict[str, int] = {}
        for knob, value in self.stated_knobs.items():
            values[knob] = evaluate(value, {**names, **values}, str(self.path))
        return values

    @property
    def bounds(self) -> tuple[int, ...]:
        """Most rows of each variant; 0: any number."""
        return self.up_to or (0,)

    def layouts_of(self, dtypes: Mapping[str, str], roles: Mapping[str, str]) -> dict[str, str]:
        """The layout of each operand that a launch has and that is not row-major.

        roles: what the hardware calls a layout by what is stored in it (`layouts` of HARDWARE.toml).

        Raises:
            BuildError: none is declared for the operand's dtype.
        """
        result = {}
        for operand, declared in self.layouts.items():
            if operand not in dtypes:
                continue
            if not isinstance(declared, str):
                found = declared.get(dtypes[operand], declared.get(OTHER))
                if found is None:
                    raise BuildError(
                        str(self.path), f"[layouts] {operand} has none for {dtypes[operand]}", ", ".join(declared)
                    )
                declared = found
            layout = roles.get(declared, declared)
            if layout not in LAYOUT_NAMES:
                accepted = ", ".join((*LAYOUT_NAMES, *roles))
                raise BuildError(str(self.path), f"[layouts] {operand} is {declared!r}", accepted)
            if layout != ROW_MAJOR:
                result[operand] = layout
        return result

    def violated(self, names: Mapping[str, int]) -> str | None:
        """The first of `legal` that does not hold for these constants, knobs and hardware facts."""
        return next((text for text in self.legal if not holds(text, names, str(self.path), "[knobs] legal")), None)

    def geometry(self, constants: Mapping[str, int | float], knobs: Mapping[str, int]) -> Geometry:
        """The launch geometry of one specialisation."""
        names = {name: value for name, value in constants.items() if isinstance(value, int)} | dict(knobs)
        where = str(self.path)
        dims = OPS[self.op].dims
        axes = tuple(axis(text, dims, names, where) for text in self.grid)
        rest = (self.block, self.shared, self.cluster, self.scratch, self.resident)
        return Geometry(axes, *(evaluate(expression, names, where) for expression in rest))


def declaration(path: Path) -> Declaration:
    """Read a kernel file's declaration.

    Raises:
        BuildError: no op of the file's name, no declaration, bad TOML, or an unknown table, key, knob
            type or operand.
    """
    (op, phase), where = named(path), str(path)
    if op not in OPS:
        near = difflib.get_close_matches(op, OPS)
        raise BuildError(where, f"no op is called {op!r}", ", ".join(OPS), f"nearest: {near[0]}" if near else "")
    document = tables(path)
    if document is None:
        if path.suffix == ".cu":
            raise BuildError(where, "has no '/* atlas' declaration")
        return Declaration(path, op, (1, 1, 1), 1, 0, 0, {}, {})
    _check_names(document, op, where)
    launch, limits = document.get("launch", {}), document.get("limits", {})
    _check_launch(launch, op, where)
    _check_limits(limits, op, where)
    knobs, choices, legal = _knobs(document.get("knobs", {}), where)
    return Declaration(
        path,
        op,
        grid=tuple(launch.get("grid", (1, 1, 1))),
        block=launch.get("block", 1),
        shared=launch.get("shared", 0),
        spills=limits.get("spills", 0),
        stated_knobs=knobs,
        layouts=_layouts(document.get("layouts", {}), where),
        choices=choices,
        legal=legal,
        cost=_cost(document.get("cost", {}), where),
        seconds=limits.get("seconds", DEFAULT_SECONDS),
        unread=tuple(limits.get("unread", ())),
        same_bits=limits.get("same_bits", False),
        also=_also(document.get("levels", {}), where),
        phase=phase,
        up_to=_bounds(document.get("rows", {}), where),
        cluster=launch.get("cluster", 1),
        pdl=launch.get("pdl", False),
        cooperative=launch.get("cooperative", False),
        arguments=tuple(launch.get("arguments", ())),
        scratch=document.get("scratch", {}).get("bytes", 0),
        resident=launch.get("resident", 1),
    )


def _check_names(document: Mapping[str, Any], op: str, where: str) -> None:
    """Every table, key and operand is one that there is."""
    for table, content in document.items():
        if table not in _TABLES:
            raise BuildError(where, f"unknown table [{table}]", ", ".join(_TABLES))
        keys = _TABLES[table]
        for key in content:
            if keys is not None and key not in keys:
                raise BuildError(where, f"unknown key {key!r} in [{table}]", ", ".join(keys))
    operands = [operand.name for operand in OPS[op].operands]
    for table, others in (("layouts", ()), ("serves", (_WHERE,))):
        for operand in document.get(table, {}):
            if operand not in (*operands, *others):
                raise BuildError(where, f"[{table}] names {operand!r}", ", ".join((*operands, *others)))
    _serves(document, where)


def _check_launch(launch: Mapping[str, Any], op: str, where: str) -> None:
    grid = launch.get("grid", [1, 1, 1])
    if not isinstance(grid, list) or len(grid) != 3:
        raise BuildError(where, f"grid is {grid!r}", "three expressions")
    for key in ("pdl", "cooperative"):
        if not isinstance(launch.get(key, False), bool):
            raise BuildError(where, f"[launch] {key} is {launch[key]!r}", "true or false")
    arguments, constants = launch.get("arguments", []), OPS[op].constants
    known = isinstance(arguments, list) and all(name in constants for name in arguments)
    if not known or len(set(arguments)) < len(arguments):
        raise BuildError(where, f"[launch] arguments is {arguments!r}", f"a list of {', '.join(constants)}, each once")


def _check_limits(limits: Mapping[str, Any], op: str, where: str) -> None:
    for key, kind in (("spills", int), ("seconds", (int, float)), ("unread", list), ("same_bits", bool)):
        if key in limits and (not isinstance(limits[key], kind) or (kind is int and isinstance(limits[key], bool))):
            raise BuildError(where, f"[limits] {key} is {limits[key]!r}", _LIMIT_KINDS[key])
    inputs = [operand.name for operand in OPS[op].operands if operand.mode == "in"]
    for name in limits.get("unread", []):
        if name not in inputs:
            raise BuildError(where, f"[limits] unread names {name!r}", ", ".join(inputs))


def _bounds(rows: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The last may be 0, any number, which no bound exceeds."""
    up_to = rows.get("up_to", [])
    ascending = isinstance(up_to, list) and all(type(bound) is int and bound >= 0 for bound in up_to)
    if not ascending or [*filter(None, up_to)] != sorted({*up_to} - {0}) or 0 in up_to[:-1]:
        raise BuildError(where, f"[rows] up_to is {up_to!r}", "ascending numbers of rows; the last may be 0, for any")
    return tuple(up_to)


def _layouts(table: Mapping[str, Any], where: str) -> Mapping[str, str | Mapping[str, str]]:
    for operand, layout in table.items():
        texts = layout.values() if isinstance(layout, dict) else (layout,)
        if not all(isinstance(text, str) for text in texts):
            raise BuildError(where, f"[layouts] {operand} is {layout!r}", "a layout, or a table: dtype = layout")
    return table


def _cost(table: Mapping[str, str | int], where: str) -> Mapping[str, str | int]:
    if COST_OF_LAUNCH in table and len(table) > 1:
        raise BuildError(where, f"[cost] has {', '.join(table)}", f"{COST_OF_LAUNCH} alone, or what a block costs")
    return table


def _also(levels: Mapping[str, Any], where: str) -> tuple[str, ...]:
    also = levels.get("also", [])
    if not isinstance(also, list) or not all(isinstance(level, str) for level in also):
        raise BuildError(where, f"[levels] also is {also!r}", "a list of levels of kernels/cpu/HARDWARE.toml")
    return tuple(also)


def named(path: Path) -> tuple[str, str]:
    """Op and phase of a kernel file's name; the phase is "" where it serves both."""
    op, *words = path.name.removesuffix(path.suffix).split(".")
    return op, words[-1] if words and words[-1] in PHASES else ""


def serves(path: Path, dtypes: Mapping[str, str], constants: Mapping[str, int | float] | None = None) -> bool:
    """Whether a kernel file is for launches whose operands have these element types and formats, and with these
    constants; None: with some."""
    stated = _serves(tables(path) or {}, str(path))
    rules = stated.pop(_WHERE, ())
    if not all(dtypes.get(operand, accepted[0]) in accepted for operand, accepted in stated.items()):
        return False
    if constants is None:
        return True
    names = {name: value for name, value in constants.items() if isinstance(value, int)}
    names |= {f"size_{operand}": DTYPE_BYTES.get(dtype, 0) for operand, dtype in dtypes.items()}
    return all(holds(rule, names, str(path), f"[serves] {_WHERE}") for rule in rules)


_WHERE = "where"
"""The key of [serves] that is no operand."""


def _serves(document: Mapping[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    table = document.get("serves", {})
    for key, texts in table.items():
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            accepted = "a list of comparisons" if key == _WHERE else "a list of element types and formats"
            raise BuildError(where, f"[serves] {key} is {texts!r}", accepted)
    for text in table.get(_WHERE, ()):
        comparison(text, where, f"[serves] {_WHERE}")
    return {key: tuple(texts) for key, texts in table.items()}


_LIMIT_KINDS = {
    "spills": "bytes",
    "seconds": "a number of seconds",
    "unread": "a list of inputs",
    "same_bits": "true or false",
}


def _knobs(
    table: dict[str, Any], where: str
) -> tuple[dict[str, str | int], dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Declared values, choices and legality rules of a [knobs] table."""
    values = dict(table)
    legal, choices = values.pop("legal", []), values.pop("choices", {})
    for knob, value in values.items():
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            raise BuildError(where, f"knob {knob} is {value!r}", "an integer or an expression")
    if not isinstance(legal, list) or not all(isinstance(text, str) for text in legal):
        raise BuildError(where, f"[knobs] legal is {legal!r}", "a list of comparisons")
    for text in legal:
        comparison(text, where, "[knobs] legal")
    if not isinstance(choices, dict):
        raise BuildError(where, f"[knobs] choices is {choices!r}", "a table: knob = [values]")
    for knob, options in choices.items():
        if knob not in values:
            raise BuildError(where, f"[knobs.choices] names {knob!r}", ", ".join(values) or "no knob is declared")
        if not isinstance(options, list) or not all(type(option) is int for option in options):
            raise BuildError(where, f"choices of {knob} are {options!r}", "a list of integers")
        if isinstance(values[knob], int) and values[knob] not in options:
            raise BuildError(where, f"choices of {knob} are {options}", f"a list that holds its value {values[knob]}")
    return values, {knob: tuple(options) for knob, options in choices.items()}, tuple(legal)


def cpu_signatures(path: Path) -> list[str]:
    """Signatures that a CPU kernel file instantiates, from its ATLAS_CPU_KERNEL lines."""
    found = _CPU_KERNEL.findall(path.read_text())
    for signature in found:
        if signature.split(".")[0] != named(path)[0]:
            raise BuildError(str(path), f"registers {signature!r}", f"signatures of op {named(path)[0]}")
    return found
