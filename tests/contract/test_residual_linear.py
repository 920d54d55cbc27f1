"""residual_linear against its reference, and the rule that a row's result depends on nothing but the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atlas.ops import OPS
from atlas.weights.quantized import BlockArray
from tests.contract.harness import Case, case
from tests.contract.inputs import first_rows, normal, values

TYPES = (
    {"x": "bf16", "weight": "bf16", "out": "bf16"},
    {"x": "f8g128", "weight": "f8", "out": "f8g128"},
    {"x": "f8g128", "weight": "f8g128", "out": "bf16"},
    *({"x": "bf16", "weight": weight, "out": "bf16"} for weight in ("nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m")),
)
OUTPUTS = ("residual", "out", "squares")


def residual(
    types: dict[str, str], n: int, k: int, rows: int, scale: float = 1.0, optional: tuple[str, ...] = ()
) -> Case:
    return case("residual_linear", types, optional=optional, n=n, k=k, eps=1e-5, scale=scale, rows=rows)


CASES = [
    residual(types, n, k, rows, scale, optional)
    for types in TYPES
    for n, k, counts, scale, optional in (
        (576, 320, (1, 2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256), 1.0, ()),
        (200, 504, (1, 8, 40, 129), 0.22, ("bias",)),
        (1000, 1736, (1, 8, 16, 30, 64, 128, 200), 1.0, ()),  # a cluster for all ranges of a block of columns
        (4096, 1024, (1, 16, 128), 1.0, ()),  # several whole ranges of each block of columns
        (4096, 576, (100,), 0.5, ("bias",)),
        (6144, 576, (40, 75, 128), 1.0, ()),  # two
        (8960, 576, (5, 32, 130), 1.0, ()),  # ranges that begin and end within blocks
        (17064, 72, (3, 33), 0.5, ()),  # more blocks than thread blocks
    )
    for rows in counts
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, Any]:
    given = {"x": values(c, "x", rng), "weight": values(c, "weight", rng, dict(c.constants)["k"] ** -0.5)}
    # None so large that a product leaves it alone: what the reference does not change must not be written.
    stream = normal(c, "residual", rng, 0.1) * np.exp(-rng.uniform(0, 3, (dict(c.dims)["rows"], 1)).astype(np.float32))
    return given | {"residual": stream} | {name: normal(c, name, rng) for name in ("norm", *c.optional)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    """Every bound that a kernel has variants for, and numbers of rows around them."""
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("n", [576, 1000, 4096, 6144, 8960])
@pytest.mark.parametrize("types", TYPES[:4], ids=lambda t: "-".join(t.values()))
def test_row_does_not_depend_on_the_batch(device, types: dict[str, str], n: int, rng) -> None:
    whole = residual(types, n, 576, 256)
    given = inputs(whole, rng)
    expected = device.run(whole, given)
    for rows in (1, 2, 8, 16, 33, 64, 128, 200):
        some = {name: first_rows(given[name], 256 - rows, 256) for name in ("x", "residual")}
        actual = device.run(residual(types, n, 576, rows), {**given, **some})
        for name in OUTPUTS:
            found, wanted = as_bytes(actual[name][:rows]), as_bytes(expected[name][256 - rows : 256])
            assert found == wanted, f"{name}, {rows} rows"


@pytest.mark.parametrize("types", TYPES[:2], ids=lambda t: t["weight"])
def test_nan_stays_in_its_row(device, types: dict[str, str], rng) -> None:
    c = residual(types, 576, 320, 9)
    given = inputs(c, rng)
    expected = device.run(c, given)
    given["residual"] = given["residual"].copy()
    given["residual"][4, 77] = np.nan
    found = device.run(c, given)
    assert np.isnan(found["residual"][4, 77]) and np.isnan(found["squares"][4, 0])
    for name in OUTPUTS:
        for row in (3, 5):
            assert as_bytes(found[name][row : row + 1]) == as_bytes(expected[name][row : row + 1])


def as_bytes(rows: Any) -> bytes:
    return rows.raw.tobytes() if isinstance(rows, BlockArray) else rows.tobytes()


@pytest.mark.parametrize(("scale", "bias"), [(1.0, False), (0.22, True)])
def test_reference_is_linear_then_residual_add(scale: float, bias: bool) -> None:
    """Bit for bit; out and squares give what residual_rms_norm does, up to fp32's rounding."""
    rng = np.random.default_rng()
    given = {
        "x": rng.standard_normal((5, 96), np.float32),
        "weight": rng.standard_normal((200, 96), np.float32),
        "residual": rng.standard_normal((5, 200), np.float32),
        "norm": rng.standard_normal(200, np.float32),
    }
    if bias:
        given["bias"] = rng.standard_normal(200, np.float32)
    found = {name: array.copy() for name, array in given.items()}
    found |= {"out": np.empty((5, 200), np.float32), "squares": np.empty((5, 2), np.float32)}
    constants = {"n": 200, "k": 96, "eps": 1e-5, "scale": scale}
    OPS["residual_linear"].reference(found, {"rows": 5}, constants)
    product, stream, normed = np.empty((5, 200), np.float32), given["residual"].copy(), np.empty((5, 200), np.float32)
    linear = {name: given[name] for name in ("x", "weight", "bias") if name in given} | {"out": product}
    OPS["linear"].reference(linear, {"rows": 5}, {"n": 200, "k": 96})
    norm = {"x": product, "residual": stream, "weight": given["norm"], "out": normed}
    OPS["residual_rms_norm"].reference(norm, {"rows": 5}, {"hidden": 200, "eps": 1e-5, "scale": scale})
    assert found["residual"].tobytes() == stream.tobytes()
    mean = np.square(np.float64(stream)).mean(-1, keepdims=True) + 1e-5
    np.testing.assert_allclose(found["squares"].sum(-1, keepdims=True), mean, rtol=1e-6)
    np.testing.assert_allclose(found["out"] / np.sqrt(mean), normed, rtol=1e-5, atol=1e-7)
