"""residual_add against its reference."""

import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case("residual_add", "f32", hidden=hidden, scale=scale, rows=rows)
    for scale in (1.0, 0.22)
    for hidden in (576, 100, 37)
    for rows in (1, 3, 130)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    given = {"x": normal(case, "x", rng), "residual": normal(case, "residual", rng, 10.0)}
    ratio = device.check(case, given)
    assert ratio <= 1.0 if dict(case.constants)["scale"] != 1.0 else ratio == 0.0
