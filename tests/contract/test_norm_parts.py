"""norm_parts against its reference, and the reference against rms_norm's."""

from __future__ import annotations

import numpy as np
import pytest

from atlas.ops import OPS
from tests.contract.harness import Case, case
from tests.contract.inputs import normal
from tests.contract.test_gated_linear import as_bytes

CASES = [
    case("norm_parts", out, hidden=hidden, eps=eps, rows=rows)
    for out in ("f32", "bf16", "f8g128")
    for hidden, eps in ((576, 1e-5), (100, 1e-5), (4096, 1e-6), (1030, 1e-6))
    for rows in (1, 2, 8, 37, 256)
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": normal(c, "x", rng, 3.0), "weight": normal(c, "weight", rng)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("out", ["bf16", "f8g128"])
def test_row_does_not_depend_on_the_batch(device, out: str, rng) -> None:
    whole = case("norm_parts", out, hidden=576, eps=1e-5, rows=130)
    given = inputs(whole, rng)
    expected = device.run(whole, given)
    for rows in (1, 3, 8, 33):
        part = case("norm_parts", out, hidden=576, eps=1e-5, rows=rows)
        actual = device.run(part, {**given, "x": given["x"][-rows:]})
        for name in ("out", "squares"):
            assert as_bytes(actual[name][:rows]) == as_bytes(expected[name][130 - rows : 130]), f"{name}, {rows} rows"


@pytest.mark.parametrize("hidden", [100, 576])
def test_parts_put_together_are_rms_norm(hidden: int) -> None:
    rng = np.random.default_rng()
    given = {"x": rng.standard_normal((5, hidden), np.float32), "weight": rng.standard_normal(hidden, np.float32)}
    out, squares = np.empty((5, hidden), np.float32), np.empty((5, -(-hidden // 128)), np.float32)
    constants = {"hidden": hidden, "eps": 1e-2}
    OPS["norm_parts"].reference({**given, "out": out, "squares": squares}, {"rows": 5}, constants)
    normed = np.empty((5, hidden), np.float32)
    OPS["rms_norm"].reference({**given, "out": normed}, {"rows": 5}, constants)
    np.testing.assert_allclose(out / np.sqrt(squares.sum(-1, keepdims=True)), normed, rtol=1e-5, atol=1e-7)
