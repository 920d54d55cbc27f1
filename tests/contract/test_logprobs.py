"""logprobs against its reference, and against probabilities worked out by hand."""

import math

import numpy as np
import pytest

from atlas.ops.logprobs import MAX_TOP
from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case("logprobs", "f32", vocab=vocab, max_top=MAX_TOP, logits=logits)
    for vocab in (49152, 320, 37, 7)
    for logits in (1, 3, 66)
    if vocab * logits < 1 << 20
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    vocab, logits = dict(c.constants)["vocab"], dict(c.dims)["logits"]
    return {
        "logits": normal(c, "logits", rng, 4.0),
        "n_top": rng.integers(-1, MAX_TOP + 1, logits).astype(np.int32),
        "target": np.where(rng.random(logits) < 0.5, rng.integers(0, vocab, logits), -1).astype(np.int32),
        "token": rng.integers(0, vocab, logits).astype(np.int32),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    given = inputs(case, rng)
    assert device.check(case, given) <= 1.0
    given["n_top"][:] = MAX_TOP
    assert device.check(case, given) <= 1.0


@pytest.mark.parametrize("scale", [1e-3, 0.5, 100.0])
def test_ties_go_to_the_lower_id(device, scale: float, rng) -> None:
    """Few distinct values: the list and the rank order equals by id, so a rank says where in the list."""
    c = case("logprobs", "f32", vocab=320, max_top=MAX_TOP, logits=5)
    given = inputs(c, rng)
    given["logits"] = (rng.integers(0, 4, (5, 320)) * scale).astype(np.float32)
    given["logits"][1] = np.where(rng.random(320) < 0.5, 0.0, -0.0)
    given["n_top"][:] = MAX_TOP
    given["target"][:] = -1
    for row in range(5):
        given["token"][row] = np.argsort(-given["logits"][row], kind="stable")[row * 4]
    assert device.check(c, given) <= 1.0
    after = device.run(c, given)
    for row in range(5):
        assert after["rank"][row] == row * 4 + 1
        assert after["top_token"][row, row * 4] == given["token"][row]
        assert after["top_logprob"][row, row * 4] == after["logprob"][row]


def test_known_probabilities(device, rng) -> None:
    c = case("logprobs", "f32", vocab=320, max_top=MAX_TOP, logits=2)
    logits = np.full((2, 320), -np.inf, np.float32)
    logits[0, [5, 9, 300]] = [1000 + math.log(2), 1000, 1000]
    logits[1, 77] = -3e38
    given = inputs(c, rng) | {"logits": logits, "n_top": np.array([4, 2], np.int32)}
    given |= {"target": np.array([9, -1], np.int32), "token": np.array([0, 78], np.int32)}
    after = device.run(c, given)
    assert after["logprob"][0] == pytest.approx(math.log(0.25), abs=1e-4) and after["rank"][0] == 2
    assert after["top_token"][0, :4].tolist() == [5, 9, 300, 0]
    assert after["top_logprob"][0, :4].tolist() == pytest.approx(
        [math.log(0.5), *[math.log(0.25)] * 2, -math.inf], 1e-4
    )
    assert after["logprob"][1] == -math.inf and after["rank"][1] == 79
    assert after["top_token"][1, :2].tolist() == [77, 0] and after["top_logprob"][1, :2].tolist() == [0.0, -math.inf]
    assert device.check(c, given) <= 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_without_an_answer_say_so(device, bad: float, rng) -> None:
    c = case("logprobs", "f32", vocab=320, max_top=MAX_TOP, logits=3)
    given = inputs(c, rng)
    given["logits"][0, 319 if bad > 0 or np.isnan(bad) else slice(None)] = bad
    given["token"][1], given["target"][:] = -1, -1
    given["n_top"][:] = 5
    after = device.run(c, given)
    assert np.isnan(after["logprob"][:2]).all() and after["rank"][:3].tolist()[:2] == [0, 0]
    assert (after["top_token"][0, :5] == -1).all() and np.isnan(after["top_logprob"][0, :5]).all()
    assert np.isfinite(after["top_logprob"][1:3, :5]).all() and np.isfinite(after["logprob"][2])
    assert device.check(c, given) <= 1.0
