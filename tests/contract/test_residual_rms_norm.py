"""residual_rms_norm against its reference, and against the two ops that it stands for."""

import numpy as np
import pytest

from atlas.ops import OPS
from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case("residual_rms_norm", {"x": x, "out": out}, hidden=hidden, eps=eps, scale=scale, rows=rows)
    for x in ("f32", "bf16")
    for out in ("f32", "bf16", "f8g128")
    for hidden, eps, scale in ((576, 1e-5, 1.0), (100, 1e-5, 0.22), (4096, 1e-6, 1.0), (1030, 1e-6, 1.0))
    for rows in (1, 2, 8, 37)
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "x": normal(c, "x", rng),
        "residual": normal(c, "residual", rng, 3.0),
        "weight": normal(c, "weight", rng),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_row_does_not_depend_on_the_batch(device, dtype: str, rng) -> None:
    whole = case("residual_rms_norm", dtype, hidden=576, eps=1e-5, scale=1.0, rows=130)
    given = inputs(whole, rng)
    expected = device.run(whole, given)
    for rows in (1, 3, 8, 33):
        part = case("residual_rms_norm", dtype, hidden=576, eps=1e-5, scale=1.0, rows=rows)
        some = {name: given[name][-rows:] for name in ("x", "residual")}
        actual = device.run(part, {**given, **some})
        for name in ("residual", "out"):
            assert actual[name][:rows].tobytes() == expected[name][130 - rows : 130].tobytes(), f"{name}, {rows} rows"


@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_reference_is_residual_add_then_rms_norm(scale: float) -> None:
    """Bit for bit, so that the fused program of a model has the unfused one's reference."""
    rng = np.random.default_rng()
    given = {name: rng.standard_normal((5, 96), np.float32) for name in ("x", "residual")}
    given["weight"] = rng.standard_normal(96, np.float32)
    fused = {name: array.copy() for name, array in given.items()} | {"out": np.empty((5, 96), np.float32)}
    OPS["residual_rms_norm"].reference(fused, {"rows": 5}, {"hidden": 96, "eps": 1e-6, "scale": scale})
    apart = {"x": given["x"], "residual": given["residual"].copy()}
    OPS["residual_add"].reference(apart, {"rows": 5}, {"hidden": 96, "scale": scale})
    out = np.empty((5, 96), np.float32)
    normed = {"x": apart["residual"], "weight": given["weight"], "out": out}
    OPS["rms_norm"].reference(normed, {"rows": 5}, {"hidden": 96, "eps": 1e-6})
    assert (fused["residual"].tobytes(), fused["out"].tobytes()) == (apart["residual"].tobytes(), out.tobytes())
