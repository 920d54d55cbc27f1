"""normed_gated_linear against its reference, and the rule that a row's result depends on nothing but the row."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import first_rows
from tests.contract.test_gated_linear import as_bytes
from tests.contract.test_normed_linear import inputs

TYPES = (
    {"x": "bf16", "weight": "bf16", "out": "bf16"},
    *({"x": "f8g128", "weight": weight, "out": "f8g128"} for weight in ("f8", "f8g128")),
    *({"x": "bf16", "weight": weight, "out": "bf16"} for weight in ("nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m")),
)


def gated(types: dict[str, str], intermediate: int, k: int, rows: int, optional: tuple[str, ...] = ()) -> Case:
    sizes = {"intermediate": intermediate, "k": k, "activation": 0, "rows": rows}
    return case("normed_gated_linear", types, optional=optional, **sizes)


CASES = [
    gated(types, intermediate, k, rows, optional)
    for types in TYPES
    for intermediate, k, counts, optional in (
        (320, 576, (1, 2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256), ()),
        (504, 200, (1, 8, 40, 129), ("bias",)),
        (3000, 320, (1, 8, 16, 30, 64, 128, 200), ()),  # two ranges of each row block
        (9000, 256, (2, 24, 128), ()),
        (14016, 72, (8, 128, 129), ()),  # more row blocks than multiprocessors, an odd number of them
        (14016, 200, (75,), ("bias",)),
    )
    for rows in counts
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    """Every bound that a kernel has variants for, and numbers of rows around them."""
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize(("intermediate", "k"), [(192, 576), (3000, 576), (14016, 72)])
@pytest.mark.parametrize("types", TYPES[:4], ids=lambda t: t["weight"])
def test_row_does_not_depend_on_the_batch(device, types: dict[str, str], intermediate: int, k: int, rng) -> None:
    whole = gated(types, intermediate, k, 256)
    given: dict[str, Any] = inputs(whole, rng)
    expected = device.run(whole, given)["out"][:256]
    for rows in (1, 2, 8, 16, 33, 64, 128, 200):
        some = {name: first_rows(given[name], 256 - rows, 256) for name in ("x", "squares")}
        actual = device.run(gated(types, intermediate, k, rows), {**given, **some})["out"][:rows]
        assert as_bytes(actual) == as_bytes(expected[256 - rows :]), f"{rows} rows"
