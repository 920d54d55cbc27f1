"""How one specialisation of a kernel is launched."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping

from atlas.errors import BuildError
from atlas.targets.expression import evaluate, names_in


@dataclasses.dataclass(frozen=True)
class Axis:
    """multiplier * ceil(dim / divisor); dim is an index into the op's dims, or -1 for a constant axis."""

    dim: int
    divisor: int
    multiplier: int


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How one specialisation is launched: grid axes, threads per block, dynamic shared memory, blocks of a cluster,
    bytes of scratch, and blocks of a multiprocessor for which registers must suffice."""

    grid: tuple[Axis, ...]
    block: int
    shared: int
    cluster: int
    scratch: int = 0
    resident: int = 1


def axis(text: str | int, dims: tuple[str, ...], names: Mapping[str, int], where: str) -> Axis:
    """An axis as a kernel file states it. dims: run-time dims of its op. Raises BuildError."""
    if not names_in(text) & set(dims):
        return Axis(-1, 1, evaluate(text, names, where))
    node = ast.parse(str(text), mode="eval").body
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for scale, inner in ((node.left, node.right), (node.right, node.left)):
            if not names_in(ast.unparse(scale)) & set(dims):
                inside = axis(ast.unparse(inner), dims, names, where)
                return Axis(inside.dim, inside.divisor, inside.multiplier * evaluate(ast.unparse(scale), names, where))
    match node:
        case ast.Name(id=name):
            return Axis(dims.index(name), 1, 1)
        case ast.Call(func=ast.Name(id="ceil_div"), args=[ast.Name(id=name), divisor]) if name in dims:
            size = evaluate(ast.unparse(divisor), names, where)
            if size <= 0:
                raise BuildError(where, f"grid axis {text!r} divides by {size}", "a positive divisor")
            return Axis(dims.index(name), size, 1)
    raise BuildError(where, f"grid axis {text!r}", "E, dim, ceil_div(dim, E), or E * one of these")
