"""load_rows against its reference, bit for bit; and its rounding against the loader's own quantisation."""

import ml_dtypes
import numpy as np
import pytest

from atlas.targets.formats import FORMATS
from atlas.weights.quantized import BlockArray, to_rows
from atlas.weights.quantizers import quantize_rows
from tests.contract.harness import case
from tests.contract.test_quantize_rows import spread

CASES = [
    case("load_rows", {"x": x, "out": out}, optional=("fault",) if out != "bf16" else (), k=k, rows=rows)
    for x in ("f32", "bf16")
    for out in ("bf16", "f8", "nvfp4", "i4g32b")
    for k in (72, 128, 576, 200, 4096, 14336)
    for rows in (1, 8, 130)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case, rng) -> None:
    assert device.check(case, {"x": spread(case, rng), "fault": np.zeros(1, np.int32)}) == 0.0


@pytest.mark.parametrize("out", ["f8", "nvfp4", "i4g32b"])
@pytest.mark.parametrize("x", ["f32", "bf16"])
@pytest.mark.parametrize("k", [200, 4096])
def test_rows_that_are_not_finite_are_told(device, x: str, out: str, k: int, rng) -> None:
    """A value that is not finite sets the word, and finite rows leave it alone; in f8 its row is NaN, and no other."""
    c = case("load_rows", {"x": x, "out": out}, optional=("fault",), k=k, rows=9)
    given = {"x": spread(c, rng), "fault": np.zeros(1, np.int32)}
    assert device.check(c, given) == 0.0
    assert device.run(c, given)["fault"][0] == 0
    for value, row, column in ((np.nan, 0, 0), (np.inf, 8, k - 1), (-np.inf, 3, k // 2)):
        broken = given["x"].copy()
        broken[row, column] = value
        after = device.run(c, {**given, "x": broken})
        assert after["fault"][0] == 1
        wrong = ~np.isfinite(after["out"][:9].astype(np.float32))
        wrong[row] |= out != "f8"
        assert wrong[row].all() and wrong.sum() == k


@pytest.mark.parametrize("format", ["f8", "nvfp4", "i4g32b"])
@pytest.mark.parametrize("k", [72, 200, 576])
def test_load_time_quantisation_is_this_rounding(format: str, k: int, rng) -> None:
    """A weight is the same whichever side of the link rounds it."""
    x = (rng.standard_normal((40, k)) * 10.0 ** rng.integers(-6, 6, (40, 1))).astype(ml_dtypes.bfloat16)
    c = case("load_rows", {"x": "bf16", "out": format}, k=k, rows=40)
    out = BlockArray(np.zeros((40, FORMATS[format].row_bytes(k)), np.uint8), FORMATS[format], k)
    c.contract.reference({"x": x, "out": out}, dict(c.dims), dict(c.constants))
    host = to_rows(quantize_rows(x.astype(np.float32), format), format)
    np.testing.assert_array_equal(out.raw, host.reshape(out.raw.shape))
