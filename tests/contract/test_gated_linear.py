"""gated_linear against its reference, and the rule that a row's result depends on nothing but the row."""

from typing import Any

import numpy as np
import pytest

from atlas.ops import OPS
from atlas.weights.quantized import BlockArray
from tests.contract.harness import Case, case
from tests.contract.inputs import first_rows, normal, values

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


_GPU_TYPES = (
    {"x": "bf16", "weight": "bf16", "out": "bf16"},
    *({"x": "f8g128", "weight": weight, "out": "f8g128"} for weight in ("f8", "f8g128")),
    *({"x": "bf16", "weight": weight, "out": "bf16"} for weight in ("nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m")),
)
GPU_CASES = [
    gated(types, intermediate, k, rows, 0, optional)
    for types in _GPU_TYPES
    for intermediate, k, counts, optional in (
        (320, 576, (1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 100, 128, 256, 300), ()),
        (504, 200, (1, 8, 40, 129), ("bias",)),
        (14016, 72, (1, 40, 128, 129), ()),  # more row blocks than multiprocessors, an odd number of them
    )
    for rows in counts
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, Any]:
    given = {"x": values(c, "x", rng), "weight": values(c, "weight", rng, dict(c.constants)["k"] ** -0.5)}
    return given | {name: normal(c, name, rng) for name in c.optional}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_formats_and_rows_of_gpus(device, case: Case, rng) -> None:
    """Every bound that a kernel has variants for, and numbers of rows around them."""
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("types", (*_TYPES, *_GPU_TYPES[1:4]), ids=lambda t: t["weight"])
def test_row_does_not_depend_on_the_batch(device, types: dict[str, str], rng) -> None:
    whole = gated(types, 192, 576, 130)
    given = inputs(whole, rng)
    expected = device.run(whole, given)["out"][:130]
    for rows in (1, 2, 8, 33):
        x = first_rows(given["x"], 130 - rows, 130)
        actual = device.run(gated(types, 192, 576, rows), {**given, "x": x})["out"][:rows]
        assert as_bytes(actual) == as_bytes(expected[130 - rows :]), f"{rows} rows"


def as_bytes(rows: Any) -> bytes:
    return rows.raw.tobytes() if isinstance(rows, BlockArray) else rows.tobytes()


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
