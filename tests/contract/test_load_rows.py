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
    case("load_rows", {"x": x, "out": out}, k=k, rows=rows)
    for x in ("f32", "bf16")
    for out in ("bf16", "f8g128")
    for k in (128, 576, 200, 4096)
    for rows in (1, 8, 130)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case, rng) -> None:
    assert device.check(case, {"x": spread(case, rng)}) == 0.0


def test_load_time_quantisation_is_this_rounding(rng) -> None:
    """A weight is the same whichever side of the link rounds it."""
    x = (rng.standard_normal((40, 576)) * 10.0 ** rng.integers(-6, 6, (40, 1))).astype(ml_dtypes.bfloat16)
    c = case("load_rows", {"x": "bf16", "out": "f8g128"}, k=576, rows=40)
    out = BlockArray(np.zeros((40, FORMATS["f8g128"].row_bytes(576)), np.uint8), FORMATS["f8g128"], 576)
    c.contract.reference({"x": x, "out": out}, dict(c.dims), dict(c.constants))
    host = to_rows(quantize_rows(x.astype(np.float32), "f8g128"), "f8g128")
    np.testing.assert_array_equal(out.raw, host.reshape(out.raw.shape))
