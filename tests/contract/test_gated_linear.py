"""gated_linear against its reference, and the rule that a row's result depends on nothing but the row."""

import numpy as np
import pytest

from atlas.ops import OPS
from tests.contract.harness import Case, case
from tests.contract.inputs import normal

_TYPES = ({"x": "bf16", "weight": "bf16", "out": "bf16"}, {"x": "f32", "weight": "f32", "out": "f32"})


def gated(
    types: dict[str, str], intermediate: int, k: int, rows: int, activation: int = 0, optional: tuple[str, ...] = ()
) -> Case:
    return case(
        "gated_linear", types, optional=optional, intermediate=intermediate, k=k, activation=activation, rows=rows
    )


CASES = [
    gated(types, intermediate, k, rows, activation, optional)
    for types in _TYPES
    for intermediate, k, rows, activation, optional in (
        (1536, 576, 1, 0, ()),
        (192, 1024, 7, 0, ()),
        (320, 576, 33, 1, ()),
        (72, 136, 130, 2, ("bias",)),
        (64, 64, 16, 0, ("bias",)),
        (17, 101, 5, 0, ()),
    )
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    given = {"x": normal(c, "x", rng), "weight": normal(c, "weight", rng, dict(c.constants)["k"] ** -0.5)}
    return given | {name: normal(c, name, rng) for name in c.optional}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("types", _TYPES, ids=lambda t: t["x"])
def test_row_does_not_depend_on_the_batch(device, types: dict[str, str], rng) -> None:
    whole = gated(types, 192, 576, 130)
    given = inputs(whole, rng)
    expected = device.run(whole, given)["out"][:130]
    for rows in (1, 2, 8, 33):
        x = given["x"][130 - rows :]
        actual = device.run(gated(types, 192, 576, rows), {**given, "x": x})["out"][:rows]
        assert actual.tobytes() == expected[130 - rows :].tobytes(), f"{rows} rows"


@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_reference_is_linear_then_gated_activation(activation: int, bias: bool) -> None:
    """Bit for bit, so that the fused program of a model has the unfused one's reference."""
    rng = np.random.default_rng()
    given = {"x": rng.standard_normal((5, 96), np.float32), "weight": rng.standard_normal((80, 96), np.float32)}
    if bias:
        given["bias"] = rng.standard_normal(80, np.float32)
    out, gate_up, apart = (np.empty((5, n), np.float32) for n in (40, 80, 40))
    constants = {"intermediate": 40, "k": 96, "activation": activation}
    OPS["gated_linear"].reference({**given, "out": out}, {"rows": 5}, constants)
    OPS["linear"].reference({**given, "out": gate_up}, {"rows": 5}, {"n": 80, "k": 96})
    OPS["gated_activation"].reference({"gate_up": gate_up, "out": apart}, {"rows": 5}, constants)
    assert out.tobytes() == apart.tobytes()
