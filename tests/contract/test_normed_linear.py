"""normed_linear against its reference, and the rule that a row's result depends on nothing but the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atlas.ops import OPS
from tests.contract.harness import Case, case
from tests.contract.inputs import first_rows, normal, values

TYPES = (
    {"x": "bf16", "weight": "bf16", "out": "f32"},
    {"x": "bf16", "weight": "bf16", "out": "bf16"},
    {"x": "f8g128", "weight": "f8", "out": "f32"},
    {"x": "f8g128", "weight": "f8g128", "out": "bf16"},
    *({"x": "bf16", "weight": weight, "out": "f32"} for weight in ("nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m")),
)


def normed(types: dict[str, str], n: int, k: int, rows: int, optional: tuple[str, ...] = ()) -> Case:
    return case("normed_linear", types, optional=optional, n=n, k=k, rows=rows)


CASES = [
    normed(types, n, k, rows, optional)
    for types in TYPES
    for n, k, counts, optional in (
        (320, 576, (1, 2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256), ()),
        (504, 200, (1, 8, 40, 129), ("bias",)),
        (640, 4096, (1, 16, 128), ()),
    )
    for rows in counts
]


def squares(c: Case, rng: np.random.Generator) -> Any:
    """Shares of mean squares from 0.001 to 1,000."""
    shape = c.shape("squares", spare=False)
    return (rng.uniform(0.1, 1.9, shape) * np.exp(rng.uniform(-7, 7, (shape[0], 1))) / shape[1]).astype(np.float32)


def inputs(c: Case, rng: np.random.Generator) -> dict[str, Any]:
    given = {"x": values(c, "x", rng), "weight": values(c, "weight", rng, dict(c.constants)["k"] ** -0.5)}
    return given | {"squares": squares(c, rng)} | {name: normal(c, name, rng) for name in c.optional}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    """Every bound that a kernel has variants for, and numbers of rows around them."""
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("types", TYPES[1:5], ids=lambda t: "-".join(t.values()))
@pytest.mark.parametrize("k", [576, 768])  # on Hopper an odd and an even number of ranges of each block of columns
def test_row_does_not_depend_on_the_batch(device, types: dict[str, str], k: int, rng) -> None:
    whole = normed(types, 320, k, 256)
    given = inputs(whole, rng)
    expected = device.run(whole, given)["out"][:256]
    for rows in (1, 2, 8, 16, 33, 64, 128, 200):
        some = {name: first_rows(given[name], 256 - rows, 256) for name in ("x", "squares")}
        actual = device.run(normed(types, 320, k, rows), {**given, **some})["out"][:rows]
        assert actual.tobytes() == expected[256 - rows :].tobytes(), f"{rows} rows"


@pytest.mark.parametrize("op", ["linear", "gated_linear"])
@pytest.mark.parametrize("bias", [False, True])
def test_reference_is_that_of_rows_divided_by_their_root(op: str, bias: bool) -> None:
    """Exactly: roots that are powers of two change no bits."""
    rng = np.random.default_rng()
    given = {"x": rng.standard_normal((5, 200), np.float32), "weight": rng.standard_normal((80, 200), np.float32)}
    if bias:
        given["bias"] = rng.standard_normal(80, np.float32)
    roots = np.float32([0.25, 0.5, 1, 2, 64])[:, None]
    shares = roots**2 * np.float32([0.25, 0.75])
    width = {"linear": 80, "gated_linear": 40}[op]
    constants = {"linear": {"n": 80, "k": 200}, "gated_linear": {"intermediate": 40, "k": 200, "activation": 0}}[op]
    found, expected = np.empty((5, width), np.float32), np.empty((5, width), np.float32)
    OPS[f"normed_{op}"].reference({**given, "squares": shares, "out": found}, {"rows": 5}, constants)
    OPS[op].reference({**given, "x": given["x"] / roots, "out": expected}, {"rows": 5}, constants)
    np.testing.assert_array_equal(found, expected)
