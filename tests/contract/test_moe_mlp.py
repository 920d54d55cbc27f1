"""moe_mlp against its reference, and the rule that a row's result depends on nothing but the row."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal


def moe(dtype: str, sizes: tuple[int, int, int, int], rows: int, activation: int = 0) -> Case:
    """`dtype`: of x and the weights, or "mixed": f32 and bf16."""
    types = {"x": "f32", "gate_up": "bf16", "down": "bf16"}
    n_experts, top_k, hidden, intermediate = sizes
    return case(
        "moe_mlp",
        types if dtype == "mixed" else dtype,
        n_experts=n_experts,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        activation=activation,
        rows=rows,
    )


SIZES = (
    (8, 2, 64, 96),
    (16, 4, 128, 160),
    (5, 3, 40, 72),  # experts begin within panels, and columns end within vectors
    (3, 1, 37, 21),  # an odd number of k
    (2, 2, 1100, 16),  # more than a stretch of k
)

CASES = [
    *(moe(dtype, sizes, rows) for dtype in ("f32", "mixed", "bf16") for sizes in SIZES for rows in (1, 7, 150)),
    *(moe(dtype, SIZES[0], 7, activation) for dtype in ("f32", "bf16") for activation in (1, 2)),
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Experts of a row differ; low ones are chosen more often, so that some have many rows and some none."""
    constants, rows = dict(c.constants), dict(c.dims)["rows"]
    n_experts, top_k = constants["n_experts"], constants["top_k"]
    liking = 1.0 / (1.0 + np.arange(n_experts)) ** 2
    chosen = [rng.choice(n_experts, top_k, replace=False, p=liking / liking.sum()) for _ in range(rows)]
    return {
        "x": normal(c, "x", rng),
        "gate_up": normal(c, "gate_up", rng, constants["hidden"] ** -0.5),
        "down": normal(c, "down", rng, constants["intermediate"] ** -0.5),
        "expert_id": np.array(chosen, np.int32),
        "expert_weight": rng.dirichlet(np.ones(top_k), rows).astype(np.float32),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    """The tolerance is wide for a bf16 value that is rounded the other way; fp32 has no such values."""
    ratio = device.check(case, inputs(case, rng))
    assert ratio <= (0.03 if case.dtype("x") == "f32" else 1.0)


@pytest.mark.parametrize("spread", ["all rows to the same experts", "as they like"])
@pytest.mark.parametrize("dtype", ["f32", "mixed", "bf16"])
def test_row_does_not_depend_on_the_batch(device, dtype: str, spread: str, rng) -> None:
    """Bit for bit, alone and among 150 rows, whatever experts the others choose."""
    sizes = SIZES[2]
    whole = moe(dtype, sizes, 150)
    given = inputs(whole, rng)
    if spread != "as they like":
        given["expert_id"][:] = (4, 0, 2)
    expected = device.run(whole, given)["out"]
    for rows, begin in ((1, 0), (1, 149), (5, 61), (65, 85)):
        own = {name: given[name][begin : begin + rows] for name in ("x", "expert_id", "expert_weight")}
        actual = device.run(moe(dtype, sizes, rows), {**given, **own})["out"][:rows]
        assert actual.tobytes() == expected[begin : begin + rows].tobytes(), f"{rows} rows from {begin}"


@pytest.mark.parametrize("dtype", ["f32", "mixed", "bf16"])
def test_an_expert_that_nobody_chose_is_not_read_and_nan_stays_in_its_row(device, dtype: str, rng) -> None:
    c = moe(dtype, SIZES[1], 9)
    given = inputs(c, rng)
    given["expert_id"][:] = (1, 3, 6, 2)
    clean = device.run(c, given)["out"].copy()
    for expert in (0, 4, 15):
        given["gate_up"].reshape(16, -1)[expert] = np.nan
        given["down"].reshape(16, -1)[expert] = np.nan
    given["x"][4, 7] = np.nan
    out = device.run(c, given)["out"]
    assert np.isnan(out[4]).all()
    assert np.delete(out[:9], 4, axis=0).tobytes() == np.delete(clean[:9], 4, axis=0).tobytes()
