"""linear_a8 against its reference, and the rules of its contract that random data do not reach."""

import numpy as np
import pytest

from atlas.ops.linear_a8 import SMALLEST
from atlas.targets.formats import FORMATS, INTEGER_FORMATS
from atlas.weights.quantized import QuantizedArray
from tests.contract.harness import Case, case
from tests.contract.inputs import blocks, normal

_SHAPES = ((960, 576, 1), (17, 576, 7), (17, 72, 8), (1, 32, 3), (96, 576, 33), (40, 72, 130), (64, 4096, 2))

CASES = [
    case("linear_a8", {"x": x, "weight": format}, n=n, k=k, rows=rows)
    for x, shapes in (("f32", _SHAPES), ("bf16", _SHAPES[1:3]))
    for format in INTEGER_FORMATS
    for n, k, rows in shapes
] + [
    case("linear_a8", {"x": x, "weight": format}, optional=("bias",), n=n, k=k, rows=rows)
    for x in ("f32", "bf16")
    for format in INTEGER_FORMATS
    for n, k, rows in _SHAPES[1:5:2]
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, object]:
    given = {"x": normal(c, "x", rng), "weight": blocks(c, "weight", rng)}
    return given | {name: normal(c, name, rng) for name in c.optional}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("format", INTEGER_FORMATS)
def test_row_does_not_depend_on_the_batch(device, format: str, rng) -> None:
    """Bit for bit, for every number of rows that a tile may have, anywhere in a batch."""
    types = {"x": "f32", "weight": format}
    whole = case("linear_a8", types, n=72, k=576, rows=130)
    given = inputs(whole, rng)
    expected = device.run(whole, given)["out"][:130]
    for rows in (*range(1, 13), 33):
        part = case("linear_a8", types, n=72, k=576, rows=rows)
        begin = int(rng.integers(131 - rows))
        x = given["x"][begin : begin + rows]
        actual = device.run(part, {"x": x, "weight": given["weight"]})["out"][:rows]
        assert actual.tobytes() == expected[begin : begin + rows].tobytes(), f"{rows} rows from {begin}"


@pytest.mark.parametrize("format", INTEGER_FORMATS)
def test_extreme_codes_do_not_saturate(device, format: str, rng) -> None:
    """Every sum as large as it can be, of either sign: int16 sums of products would overflow."""
    c = case("linear_a8", {"x": "f32", "weight": format}, n=33, k=96, rows=5)
    given = inputs(c, rng)
    weight = given["weight"]
    assert isinstance(weight, QuantizedArray)
    low, high = (-128, 127) if FORMATS[format].signed else (0, 15)
    weight.codes[:] = np.where(rng.random((33, 1)) < 0.5, low, high)
    given["x"][:] = np.where(rng.random((5, 1)) < 0.5, np.float32(-3.5), np.float32(3.5))
    given["x"][4] = np.where(rng.random(96) < 0.5, np.float32(-1), np.float32(1))
    assert device.check(c, given) <= 1.0


@pytest.mark.parametrize("x", ["f32", "bf16"])
def test_groups_without_a_scale(device, x: str, rng) -> None:
    """Zeros give zeros, tiny values too, what is no number spoils its own row and no other."""
    c = case("linear_a8", {"x": x, "weight": "i4g32m"}, n=40, k=72, rows=9)
    given = inputs(c, rng)
    values = given["x"]
    values[0] = 0
    values[1, :32] = 0
    values[2] *= SMALLEST / 8  # every group counts as zeros
    values[3, 40] = np.nan
    values[4, 71] = np.inf
    values[5, 0] = -np.inf
    values[6] *= 2.0**100
    values[7] = SMALLEST  # the smallest group that does not
    assert device.check(c, given) <= 1.0
    out = device.run(c, given)["out"][:9]
    assert (out[[0, 2]] == 0).all()
    assert np.isnan(out[3:6]).all()
    assert np.isfinite(out[[0, 1, 2, 6, 7, 8]]).all()
    assert (out[7] != 0).all()
