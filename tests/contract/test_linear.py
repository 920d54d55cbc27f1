"""linear against its reference, and the rule that a row's result depends on nothing but the row."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal

_TYPES = (
    {"x": "f32", "weight": "f32", "out": "f32"},
    {"x": "bf16", "weight": "bf16", "out": "f32"},
    {"x": "f32", "weight": "bf16", "out": "f32"},
)

CASES = [
    case("linear", types, optional=optional, n=n, k=k, rows=rows)
    for types in _TYPES
    for optional in ((), ("bias",))
    for n, k, rows in (
        (960, 576, 1),
        (960, 576, 7),
        (576, 1536, 33),
        (3072, 576, 130),
        (17, 576, 5),
        (1, 64, 3),
        (130, 72, 65),
        (320, 4096, 2),
        (70, 101, 19),
    )
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    given = {"x": normal(c, "x", rng), "weight": normal(c, "weight", rng, dict(c.constants)["k"] ** -0.5)}
    return given | {name: normal(c, name, rng) for name in c.optional}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("optional", [(), ("bias",)], ids=["plain", "bias"])
@pytest.mark.parametrize("types", _TYPES, ids=lambda t: "-".join(t.values()))
def test_row_does_not_depend_on_the_batch(device, types, optional, rng) -> None:
    """Bit for bit: known failure 11, 'correct at n = 1, garbage at n >= 4', and batch invariance."""
    whole = case("linear", types, optional=optional, n=576, k=1536, rows=130)
    given = inputs(whole, rng)
    expected = device.run(whole, given)["out"][:130]
    for rows in (1, 2, 4, 8, 33):
        part = case("linear", types, optional=optional, n=576, k=1536, rows=rows)
        for begin in (0, 130 - rows):
            x = given["x"][begin : begin + rows]
            actual = device.run(part, {**given, "x": x})["out"][:rows]
            assert actual.tobytes() == expected[begin : begin + rows].tobytes(), f"{rows} rows from {begin}"
