"""A kernel file's declaration: launch geometry, knobs, limits and layouts, written beside the kernel.

Every kernel file opens with a comment that begins `/* atlas` and holds TOML:

    /* atlas
    [launch]
    grid = ["ceil_div(rows, TILE_M)", "ceil_div(n, TILE_N)", 1]
    block = 128
    shared = 0
    [limits]
    spills = 0
    [knobs]
    TILE_M = 16
    [layouts]
    weight = "panel16"
    */

A grid axis is an integer expression over constants and knobs, or has exactly one run-time dim, as
`dim`, `ceil_div(dim, E)` or a product of one of these with an integer expression.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas.errors import BuildError
from atlas.ops import OPS
from atlas.targets.expression import evaluate, names_in

_DECLARATION = re.compile(r"/\* atlas\n(.*?)\*/", re.DOTALL)
_CPU_KERNEL = re.compile(r"^ATLAS_CPU_KERNEL\(\s*\"([\w.]+)\"", re.MULTILINE)
_TABLES: dict[str, tuple[str, ...] | None] = {
    "launch": ("grid", "block", "shared"),
    "limits": ("spills",),
    "knobs": None,
    "layouts": None,
}


@dataclasses.dataclass(frozen=True)
class Axis:
    """multiplier * ceil(dim / divisor); dim is an index into the op's dims, or -1 for a constant axis."""

    dim: int
    divisor: int
    multiplier: int


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a kernel file says about itself."""

    path: Path
    op: str
    grid: tuple[str | int, ...]
    block: str | int
    shared: str | int
    spills: int
    knobs: Mapping[str, int]
    layouts: Mapping[str, str]

    def geometry(
        self, constants: Mapping[str, int | float], knobs: Mapping[str, int]
    ) -> tuple[tuple[Axis, ...], int, int]:
        """Grid axes, threads per block and dynamic shared memory in bytes, for one specialisation."""
        names = {name: value for name, value in constants.items() if isinstance(value, int)} | dict(knobs)
        where = str(self.path)
        dims = OPS[self.op].dims
        axes = tuple(_axis(text, dims, names, where) for text in self.grid)
        return axes, evaluate(self.block, names, where), evaluate(self.shared, names, where)


def declaration(path: Path) -> Declaration:
    """Read a kernel file's declaration.

    Raises:
        BuildError: no op of the file's name, no declaration, bad TOML, or an unknown table, key, knob
            type or operand.
    """
    op, where = path.stem, str(path)
    if op not in OPS:
        near = difflib.get_close_matches(op, OPS)
        raise BuildError(where, f"no op is called {op!r}", ", ".join(OPS), f"nearest: {near[0]}" if near else "")
    match = _DECLARATION.search(path.read_text())
    if not match:
        if path.suffix == ".cu":
            raise BuildError(where, "has no '/* atlas' declaration")
        return Declaration(path, op, (1, 1, 1), 1, 0, 0, {}, {})
    try:
        document: dict[str, dict[str, Any]] = tomllib.loads(match.group(1))
    except tomllib.TOMLDecodeError as error:
        raise BuildError(where, f"declaration is not valid TOML: {error}") from None
    for table, content in document.items():
        if table not in _TABLES:
            raise BuildError(where, f"unknown table [{table}]", ", ".join(_TABLES))
        keys = _TABLES[table]
        for key in content:
            if keys is not None and key not in keys:
                raise BuildError(where, f"unknown key {key!r} in [{table}]", ", ".join(keys))
    knobs, layouts = document.get("knobs", {}), document.get("layouts", {})
    for knob, value in knobs.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise BuildError(where, f"knob {knob} is {value!r}", "an integer")
    for operand in layouts:
        if operand not in {o.name for o in OPS[op].operands}:
            raise BuildError(where, f"[layouts] names {operand!r}", ", ".join(o.name for o in OPS[op].operands))
    launch = document.get("launch", {})
    grid = launch.get("grid", [1, 1, 1])
    if not isinstance(grid, list) or len(grid) != 3:
        raise BuildError(where, f"grid is {grid!r}", "three expressions")
    return Declaration(
        path,
        op,
        tuple(grid),
        launch.get("block", 1),
        launch.get("shared", 0),
        document.get("limits", {}).get("spills", 0),
        knobs,
        layouts,
    )


def cpu_signatures(path: Path) -> list[str]:
    """Signatures that a CPU kernel file instantiates, from its ATLAS_CPU_KERNEL lines."""
    found = _CPU_KERNEL.findall(path.read_text())
    for signature in found:
        if signature.split(".")[0] != path.stem:
            raise BuildError(str(path), f"registers {signature!r}", f"signatures of op {path.stem}")
    return found


def _axis(text: str | int, dims: tuple[str, ...], names: Mapping[str, int], where: str) -> Axis:
    if not names_in(text) & set(dims):
        return Axis(-1, 1, evaluate(text, names, where))
    node = ast.parse(str(text), mode="eval").body
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for scale, inner in ((node.left, node.right), (node.right, node.left)):
            if not names_in(ast.unparse(scale)) & set(dims):
                axis = _axis(ast.unparse(inner), dims, names, where)
                return Axis(axis.dim, axis.divisor, axis.multiplier * evaluate(ast.unparse(scale), names, where))
    match node:
        case ast.Name(id=name):
            return Axis(dims.index(name), 1, 1)
        case ast.Call(func=ast.Name(id="ceil_div"), args=[ast.Name(id=name), divisor]) if name in dims:
            return Axis(dims.index(name), evaluate(ast.unparse(divisor), names, where), 1)
    raise BuildError(where, f"grid axis {text!r}", "E, dim, ceil_div(dim, E), or E * one of these")
