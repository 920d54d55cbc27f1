"""Products as large as a model's, on GPUs: blocks draw more tiles than their rings have slots, and share row blocks
with several others. The shapes of test_linear.py give a block one tile or none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import first_rows, values
from tests.contract.test_gated_linear import as_bytes

FORMATS = {"bf16": "bf16", "f8": "f8g128", "nvfp4": "bf16", "i4g32b": "bf16"}
"""Of weights -> of x."""


def product(op: str, weight: str, rows: int) -> Case:
    x = FORMATS[weight]
    if op == "linear":
        return case(op, {"x": x, "weight": weight, "out": "bf16"}, n=2056, k=8192, rows=rows)
    return case(op, {"x": x, "weight": weight, "out": x}, intermediate=3976, k=4096, activation=0, rows=rows)


@pytest.mark.parametrize("weight", FORMATS)
@pytest.mark.parametrize("op", ["linear", "gated_linear"])
def test_matches_reference_and_rows_do_not_depend_on_the_batch(device, op: str, weight: str, rng) -> None:
    most = product(op, weight, 128)
    if device.name == "collect":  # the kernel's key is all it wants; inputs take seconds
        device.check(most, {})
        return
    given: dict[str, Any] = {
        "x": values(most, "x", rng),
        "weight": values(most, "weight", rng, dict(most.constants)["k"] ** -0.5),
    }
    assert device.check(most, given) <= 1.0
    expected = device.run(most, given)["out"][:128]
    for rows in (1, 8, 17, 64):
        part = {**given, "x": first_rows(given["x"], 128 - rows, 128)}
        found = device.run(product(op, weight, rows), part)["out"][:rows]
        assert as_bytes(found) == as_bytes(expected[128 - rows :]), f"{rows} rows"
