"""Integer expressions over names, as they stand in op contracts and kernel declarations.

Standard library only: a build environment has no NumPy.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping

from atlas.errors import BuildError


def ceil_div(a: int, b: int) -> int:
    """The smallest integer q with q * b >= a."""
    return -(-a // b)


_FUNCTIONS: dict[str, Callable[..., int]] = {"ceil_div": ceil_div, "min": min, "max": max}


def evaluate(expression: str | int, names: Mapping[str, int], where: str) -> int:
    """The value of an expression of +, -, *, //, %, ceil_div, min, max, integers and `names`.

    Raises:
        BuildError: on any other syntax and on an unknown name; `where` says whose expression it is.
    """
    if isinstance(expression, int):
        return expression
    try:
        tree = _parsed(expression)
    except SyntaxError as error:
        raise BuildError(where, f"{expression!r} is not an expression ({error.msg})") from None
    return _walk(tree, names, where, expression)


@functools.cache
def names_in(expression: str | int) -> frozenset[str]:
    """Names that an expression refers to, functions left out."""
    if isinstance(expression, int):
        return frozenset()
    found = {node.id for node in ast.walk(_parsed(expression)) if isinstance(node, ast.Name)}
    return frozenset(found - set(_FUNCTIONS))


@functools.cache
def _parsed(expression: str) -> ast.expr:
    """A program has thousands of buffers whose shapes are a few expressions."""
    return ast.parse(expression, mode="eval").body


def _walk(node: ast.expr, names: Mapping[str, int], where: str, text: str) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise BuildError(where, f"unknown name {name!r} in {text!r}", ", ".join(sorted(names)))
            return names[name]
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _walk(left, names, where, text), _walk(right, names, where, text)
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv() if b != 0:
                    return a // b
                case ast.Mod() if b != 0:
                    return a % b
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]) if function in _FUNCTIONS:
            return _FUNCTIONS[function](*(_walk(argument, names, where, text) for argument in arguments))
    raise BuildError(where, f"unsupported expression {text!r}", "+ - * // % ceil_div min max, integers, names")
