"""Integer expressions of contracts and declarations: their values, and what is none."""

from __future__ import annotations

import pytest

from atlas.errors import BuildError
from atlas.targets.expression import evaluate, names_in

NAMES = {"n": 7, "k": 3, "max": 11}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (5, 5),
        ("5", 5),
        ("n", 7),
        ("n + k * 2 - 1", 12),
        ("n // k + n % k", 3),
        ("ceil_div(n, k)", 3),
        ("min(n, k, 1) + max(n, ceil_div(n, 2))", 8),
        ("(n + 1) * (k - 5)", -16),
    ],
)
def test_the_value(expression: str | int, value: int) -> None:
    names = {name: n for name, n in NAMES.items() if name != "max"}
    assert evaluate(expression, names, "x.cu") == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("m + 1", "x.cu: unknown name 'm' in 'm . 1'; accepted: k, max, n"),
        ("__import__('os')", "x.cu: unsupported expression"),
        ("n.real", "x.cu: unsupported expression"),
        ("[n][0]", "x.cu: unsupported expression"),
        ("n if k else 1", "x.cu: unsupported expression"),
        ("n ** k", "x.cu: unsupported expression"),
        ("-n", "x.cu: unsupported expression"),
        ("'n'", "x.cu: unsupported expression"),
        ("1.5", "x.cu: unsupported expression"),
        ("min(n, key=k)", "x.cu: unsupported expression"),
        ("min()", "x.cu: unsupported expression"),
        ("ceil_div", "x.cu: unsupported expression"),
        ("n +", "x.cu: 'n .' is not an expression"),
        ("n // (k - 3)", "x.cu: 'n // .k - 3.' divides by zero"),
        ("ceil_div(n, k - 3)", r"x.cu: 'ceil_div\(n, k - 3\)' divides by zero"),
    ],
)
def test_what_is_none(expression: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        evaluate(expression, NAMES, "x.cu")


def test_names_are_those_that_must_be_given() -> None:
    assert names_in("ceil_div(n, min(k, 8)) + n") == {"n", "k"}
    assert names_in(4) == frozenset()
