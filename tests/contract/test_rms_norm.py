"""rms_norm against its reference."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case("rms_norm", dtype, hidden=hidden, eps=eps, rows=rows)
    for dtype in ("f32", "bf16")
    for hidden, eps in ((576, 1e-5), (64, 1e-6), (100, 1e-5), (2048, 1e-5), (4097, 1e-6))
    for rows in (1, 2, 37)
]

F8_CASES = [
    case("rms_norm", "f8g128", hidden=hidden, eps=1e-5, rows=rows) for hidden in (576, 100, 4096) for rows in (1, 3, 37)
]


@pytest.mark.parametrize("case", F8_CASES, ids=str)
def test_rows_in_f8g128(device, case: Case, rng) -> None:
    if device.name.startswith("cpu"):
        pytest.skip("rows in f8g128 are a GPU's")
    given = {"x": normal(case, "x", rng, 3.0), "weight": normal(case, "weight", rng)}
    assert device.check(case, given) <= 1.0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    given = {"x": normal(case, "x", rng, 3.0), "weight": normal(case, "weight", rng)}
    assert device.check(case, given) <= 1.0


def test_tiny_and_huge_rows(device, rng) -> None:
    """eps decides for a row of zeros; squares of large values must not overflow to a zero scale."""
    c = case("rms_norm", "f32", hidden=576, eps=1e-5, rows=3)
    x = normal(c, "x", rng)
    x[0], x[1] = 0.0, x[1] * 1e15
    out = device.run(c, {"x": x, "weight": np.ones(576, np.float32)})["out"]
    assert (out[0] == 0).all()
    assert np.isclose(np.sqrt(np.mean(out[1].astype(np.float64) ** 2)), 1.0, rtol=1e-4)
