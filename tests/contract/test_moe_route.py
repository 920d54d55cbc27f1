"""moe_route against its reference: which experts, in which order, and their weights."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case("moe_route", {}, n_experts=n_experts, top_k=top_k, normalise=normalise, rows=rows)
    for n_experts, top_k in ((8, 2), (128, 8), (60, 4), (5, 5), (1, 1))
    for normalise in (0, 1)
    for rows in (1, 7, 130)
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_matches_reference(device, case: Case, scale: float, rng) -> None:
    """At scale 40 one expert has nearly all of the weight."""
    assert device.check(case, {"logits": normal(case, "logits", rng, scale)}) <= 1.0


@pytest.mark.parametrize("normalise", [0, 1])
def test_ties_go_to_the_lower_index(device, normalise: int, rng) -> None:
    """Logits of few values: most of the chosen ones tie with others."""
    c = case("moe_route", {}, n_experts=40, top_k=6, normalise=normalise, rows=64)
    logits = rng.integers(0, 3, (64, 40)).astype(np.float32)
    logits[0] = 1.0
    logits[1] = (0.0, -0.0) * 20  # equal, whatever their sign
    logits[2, 5:] = -np.inf
    assert device.check(c, {"logits": logits}) <= 1.0
    ids = device.run(c, {"logits": logits})["expert_id"]
    assert ids[0].tolist() == ids[1].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_row_that_is_no_number_is_reported_in_its_weights(device, rng) -> None:
    c = case("moe_route", {}, n_experts=24, top_k=3, normalise=1, rows=5)
    logits = normal(c, "logits", rng)
    logits[1, 17] = np.nan
    logits[2, 3] = np.inf
    logits[3] = -np.inf
    after = device.run(c, {"logits": logits})
    assert np.isnan(after["expert_weight"][1:4]).all() and np.isfinite(after["expert_weight"][[0, 4]]).all()
    assert (after["expert_id"][1:4] == (0, 1, 2)).all()
    assert device.check(c, {"logits": logits}) <= 1.0
