"""linear against its reference, and the rule that a row's result depends on nothing but the row."""

from typing import Any

import numpy as np
import pytest

from atlas.targets.quant import E4M3_WEIGHTS
from tests.contract.harness import Case, case
from tests.contract.inputs import first_rows, normal, values

_TYPES = (
    {"x": "f32", "weight": "f32", "out": "f32"},
    {"x": "bf16", "weight": "bf16", "out": "f32"},
    {"x": "f32", "weight": "bf16", "out": "f32"},
)

CASES = [
    case("linear", types, optional=optional, n=n, k=k, rows=rows)
    for types in _TYPES
    for n, k, rows, optionals in (
        (960, 576, 1, ((), ("bias",))),
        (960, 576, 7, ((),)),
        (576, 1536, 33, ((),)),
        (3072, 576, 130, ((), ("bias",))),
        (17, 576, 5, ((),)),
        (1, 64, 3, ((), ("bias",))),
        (130, 72, 65, ((),)),
        (320, 4096, 2, ((),)),
        (70, 101, 19, ((), ("bias",))),
    )
    for optional in optionals
]

_GPU_FORMATS = ("f8", "f8g128", "nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m")
GPU_CASES = [
    case("linear", {**types, "out": out}, optional=optional, n=n, k=k, rows=rows)
    for types in (
        {"x": "bf16", "weight": "bf16"},
        *({"x": "f8g128" if w in E4M3_WEIGHTS else "bf16", "weight": w} for w in _GPU_FORMATS),
    )
    for n, k, out, counts, optional in (
        (320, 576, "f32", (1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 100, 128, 256, 300), ()),
        (320, 576, "bf16", (1, 8, 64, 129), ("bias",)),
        (998, 200, "f32", (1, 129), ("bias",)),
        (998, 200, "bf16", (8, 40), ("bias",)),
        # On Hopper neighbours add up first what they have of these: of two, four, six or twelve parts.
        (400, 256, "bf16", (1, 64, 100, 129), ("bias",)),
        (320, 768, "f32", (1, 32, 33, 64, 65, 121, 128, 129), ()),
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
    if device.name.startswith("cpu"):
        pytest.skip("a CPU multiplies block formats with linear_a8")
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("optional", [(), ("bias",)], ids=["plain", "bias"])
@pytest.mark.parametrize("types", _TYPES, ids=lambda t: "-".join(t.values()))
def test_row_does_not_depend_on_the_batch(device, types, optional, rng) -> None:
    """Bit for bit: known failure 11, 'correct at n = 1, garbage at n >= 4', and batch invariance."""
    independent(device, types, optional, rng, (1, 2, 4, 8, 33), 130)


@pytest.mark.parametrize("weight", _GPU_FORMATS)
def test_row_does_not_depend_on_the_batch_on_gpus(device, weight: str, rng) -> None:
    """Over the variants of a phase: they differ in nothing that a row sees."""
    if device.name.startswith("cpu"):
        pytest.skip("a CPU multiplies block formats with linear_a8")
    types = {"x": "f8g128" if weight in E4M3_WEIGHTS else "bf16", "weight": weight, "out": "f32"}
    independent(device, types, (), rng, (1, 2, 8, 16, 17, 64, 128), 256)
    independent(device, types, (), rng, (1, 24, 40, 64, 104, 128), 256, 768)


def independent(device, types, optional, rng, counts: tuple[int, ...], most: int, k: int = 576) -> None:
    whole = case("linear", types, optional=optional, n=320, k=k, rows=most)
    given = inputs(whole, rng)
    expected = device.run(whole, given)["out"][:most]
    for rows in counts:
        part = case("linear", types, optional=optional, n=320, k=k, rows=rows)
        for begin in (0, most - rows):
            x = first_rows(given["x"], begin, begin + rows)
            actual = device.run(part, {**given, "x": x})["out"][:rows]
            assert actual.tobytes() == expected[begin : begin + rows].tobytes(), f"{rows} rows from {begin}"
