"""Products with weights in formats that only GPUs multiply: linear and gated_linear against their references.

On a CPU nothing runs; the last test holds the reference itself to its words.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas.ops.op import product
from atlas.targets.formats import FORMATS
from atlas.targets.quant import E4M3_WEIGHTS
from atlas.weights.quantized import BlockArray, QuantizedArray, to_rows
from atlas.weights.quantizers import quantize_int4, quantize_rows
from tests.contract.harness import Case, case
from tests.contract.inputs import normal

FOUR_BIT = ("nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m")
_ROWS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 100, 128, 256)


def cases(format: str) -> list[Case]:
    """Every number of rows at sizes that no tile divides, and some longer sums."""
    x = "f8g128" if format in E4M3_WEIGHTS else "bf16"
    linear, gated = ({"x": x, "weight": format, "out": out} for out in ("f32", x))
    found = [case("linear", linear, optional=("bias",), n=300, k=576, rows=rows) for rows in _ROWS]
    found += [case("linear", linear, n=n, k=k, rows=rows) for n, k, rows in ((130, 72, 5), (320, 4096, 2))]
    sizes = {"k": 576, "activation": 0}
    found += [case("gated_linear", gated, intermediate=200, rows=rows, **sizes) for rows in (1, 8, 33, 128)]
    return [*found, case("gated_linear", gated, optional=("bias",), intermediate=64, k=72, activation=2, rows=19)]


CASES = [case for format in (*E4M3_WEIGHTS, *FOUR_BIT) for case in cases(format)]


def weight(format: str, values: np.ndarray) -> QuantizedArray:
    """Random values in a format, exactly as a checkpoint might hold them."""
    if format == "i4g32z":
        return quantize_int4(values, 32, "zero")
    return quantize_rows(values, format)


def inputs(c: Case, rng: np.random.Generator) -> dict[str, Any]:
    n, k = c.shape("weight")
    given: dict[str, Any] = {"weight": weight(c.dtype("weight"), rng.standard_normal((n, k)) * k**-0.5)}
    rows = rng.standard_normal(c.shape("x", spare=False), np.float32)
    given["x"] = quantize_rows(rows, "f8g128") if c.dtype("x") == "f8g128" else rows.astype(ml_dtypes.bfloat16)
    return given | {name: normal(c, name, rng) for name in c.optional}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("format", (*E4M3_WEIGHTS, *FOUR_BIT))
def test_row_does_not_depend_on_the_batch(device, format: str, rng) -> None:
    """Bit for bit, over every variant of a phase."""
    types = {"x": "f8g128" if format in E4M3_WEIGHTS else "bf16", "weight": format, "out": "f32"}
    whole = case("linear", types, n=300, k=576, rows=130)
    given = inputs(whole, rng)
    expected = device.run(whole, given)["out"][:130]
    for rows in (1, 8, 9, 33, 65):
        x = given["x"]
        x = x.rows(130 - rows, 130) if isinstance(x, QuantizedArray) else x[130 - rows :]
        actual = device.run(case("linear", types, n=300, k=576, rows=rows), {**given, "x": x})["out"][:rows]
        assert actual.tobytes() == expected[130 - rows :].tobytes(), f"{rows} rows"


@pytest.mark.parametrize("format", (*E4M3_WEIGHTS, *FOUR_BIT))
def test_the_reference_multiplies_what_the_format_holds(format: str) -> None:
    """In float64, from the codes; of 4 bits, values rounded to bf16, or exact ones and a scale for each row."""
    rng = np.random.default_rng()
    array = weight(format, rng.standard_normal((9, 96)))
    x = rng.standard_normal((3, 96), np.float32)
    values = array.dequantize().astype(np.float64)
    if format.startswith("i4"):
        values = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    found = product(x, BlockArray(to_rows(array, format), FORMATS[format], 96))
    np.testing.assert_allclose(found, x.astype(np.float64) @ values.T, rtol=2e-5, atol=2e-5)
