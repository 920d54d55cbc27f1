"""quantize_rows against its reference: bit for bit, so that every rounding is to nearest, ties to even."""

import ml_dtypes
import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case("quantize_rows", {"x": dtype}, k=k, rows=rows)
    for dtype in ("f32", "bf16")
    for k in (128, 576, 4096, 200)
    for rows in (1, 3, 8, 130)
]


def spread(c: Case, rng: np.random.Generator) -> np.ndarray:
    """Rows of very different size, one of zeros, one too small for a scale, and values halfway between codes."""
    x = normal(c, "x", rng).astype(np.float32) * 10.0 ** rng.integers(-8, 8, (dict(c.dims)["rows"], 1))
    rows = len(x)
    x[rows // 2, : x.shape[1] // 2] = 0
    if rows > 3:
        x[1] *= np.float32(1e-30)
        codes = np.arange(1, 126, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        ties = (codes[:-1] + codes[1:]) / 2
        x[2, : min(len(ties), x.shape[1])] = ties[: x.shape[1]]
        x[2, min(127, x.shape[1] - 1)] = 448
    return x.astype(np.float32 if c.dtype("x") == "f32" else ml_dtypes.bfloat16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, {"x": spread(case, rng)}) == 0.0


def test_what_is_not_finite_makes_its_group_nan(device, rng) -> None:
    c = case("quantize_rows", {"x": "f32"}, k=576, rows=4)
    x = normal(c, "x", rng)
    x[0, 5], x[1, 300], x[2, 575] = np.nan, np.inf, -np.inf
    out = device.run(c, {"x": x})["out"][:4].astype(np.float32)
    for row, group in ((0, 0), (1, 2), (2, 4)):
        broken = np.zeros(576, bool)
        broken[128 * group : 128 * group + 128] = True
        assert (np.isnan(out[row]) == broken).all()
    assert np.isfinite(out[3]).all()
