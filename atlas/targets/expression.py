"""Integer expressions over names, as they stand in op contracts and kernel declarations, and comparisons of them.

Standard library only: a build environment has no NumPy.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from types import CodeType

from atlas.errors import BuildError


def ceil_div(a: int, b: int) -> int:
    """The smallest integer q with q * b >= a."""
    return -(-a // b)


_FUNCTIONS: dict[str, Callable[..., int]] = {"ceil_div": ceil_div, "min": min, "max": max}
_GLOBALS: dict[str, object] = {"__builtins__": {}, **_FUNCTIONS}


def evaluate(expression: str | int, names: Mapping[str, int], where: str) -> int:
    """The value of an expression of +, -, *, //, %, ceil_div, min, max, integers and `names`.

    Raises:
        BuildError: on any other syntax, an unknown name and a division by zero; `where` says whose expression it is.
    """
    if isinstance(expression, int):
        return expression
    try:
        code = _compiled(expression)
    except SyntaxError as error:
        raise BuildError(where, f"{expression!r} is not an expression ({error.msg})") from None
    if code is not None:
        try:
            return int(eval(code, _GLOBALS, names))
        except NameError as error:
            raise BuildError(
                where, f"unknown name {error.name!r} in {expression!r}", ", ".join(sorted(names))
            ) from None
        except ZeroDivisionError:
            raise BuildError(where, f"{expression!r} divides by zero", "a divisor that is not 0") from None
        except TypeError:
            pass  # said below: a function without its arguments
    raise BuildError(where, f"unsupported expression {expression!r}", "+ - * // % ceil_div min max, integers, names")


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


@functools.cache
def _compiled(expression: str) -> CodeType | None:
    """Code of an expression that has nothing but what is allowed; None if it has more. A build evaluates a hundred
    thousand of a few hundred."""
    tree = _parsed(expression)
    return compile(ast.Expression(tree), "<expression>", "eval") if _allowed(tree) else None


def _allowed(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int()) | ast.Name():
            return True
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod(), right=right):
            return _allowed(left) and _allowed(right)
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]) if function in _FUNCTIONS:
            return all(map(_allowed, arguments))
    return False


_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def holds(text: str, names: Mapping[str, int], where: str, key: str) -> bool:
    """Whether a comparison of two expressions, `A <= B`, holds. Raises BuildError, for `key` of `where`."""
    left, compare, right = comparison(text, where, key)
    return compare(evaluate(left, names, where), evaluate(right, names, where))


@functools.cache
def comparison(text: str, where: str, key: str) -> tuple[str, Callable[[int, int], bool], str]:
    """Its left side, operator and right side. Raises as `holds`."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        node = None
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        return ast.unparse(node.left), _COMPARISONS[type(node.ops[0])], ast.unparse(node.comparators[0])
    raise BuildError(where, f"{key} has {text!r}", "a comparison of two integer expressions, e.g. 'A % 8 == 0'")
