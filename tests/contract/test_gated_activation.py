"""gated_activation against its reference, and against what each activation is by definition."""

import math

import numpy as np
import pytest

from atlas.ops.gated_activation import GELU_ERF, GELU_TANH, SILU, activate
from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case(
        "gated_activation", {"gate_up": "f32", "out": out}, intermediate=intermediate, activation=activation, rows=rows
    )
    for out in ("f32", "bf16")
    for activation in (SILU, GELU_TANH, GELU_ERF)
    for intermediate in (1536, 192, 37)
    for rows in (1, 3, 130)
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_matches_reference(device, case: Case, scale: float, rng) -> None:
    """At scale 50 the activation saturates on both sides: exp must reach 0 and infinity without a NaN."""
    assert device.check(case, {"gate_up": normal(case, "gate_up", rng, scale)}) <= 1.0


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, GELU_ERF])
def test_each_value_alone(device, activation: int) -> None:
    """Relative to the value itself, from the far tail to the identity: a row's largest value hides small errors."""
    gate = np.concatenate([np.linspace(-9, 9, 4001), np.logspace(-30, -1, 200), -np.logspace(-30, -1, 200)])
    gate = gate.astype(np.float32)
    c = case("gated_activation", "f32", intermediate=len(gate), activation=activation, rows=1)
    given = {"gate_up": np.concatenate([gate, np.ones_like(gate)])[None, :]}
    actual = device.run(c, given)["out"][0].astype(np.float64)
    expected = np.array([_exact(float(g), activation) for g in gate])
    # The exponent of a tail, up to 100, is itself rounded to fp32.
    assert (np.abs(actual - expected) <= 2e-5 * np.abs(expected) + 1e-37).all()


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, GELU_ERF])
def test_numbers_that_are_none(device, activation: int) -> None:
    """NaN stays NaN, +inf stays +inf, and a huge negative number gives a zero."""
    gate = np.array([np.nan, np.inf, -1e30, 1e30, 0.0, -0.0], np.float32)
    c = case("gated_activation", "f32", intermediate=len(gate), activation=activation, rows=1)
    out = device.run(c, {"gate_up": np.concatenate([gate, np.ones_like(gate)])[None, :]})["out"][0]
    assert np.isnan(out[0]) and out[1] == np.inf and out[3] == np.float32(1e30)
    assert (out[[2, 4, 5]] == 0.0).all()


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, GELU_ERF])
def test_the_reference_is_the_definition(activation: int) -> None:
    x = np.linspace(-6, 6, 1001).astype(np.float32)
    expected = [_exact(float(v), activation) for v in x]
    assert np.allclose(activate(x, activation), expected, rtol=1e-6, atol=1e-6)


def _exact(x: float, activation: int) -> float:
    """In fp64, by formulas that keep their digits where x is large and negative."""
    if activation == SILU:
        return x / (1.0 + math.exp(-x))
    if activation == GELU_TANH:
        return x / (1.0 + math.exp(-2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * math.erfc(-x / math.sqrt(2.0))
