"""adjust_logits against its reference, and against the definitions of the penalties, token by token."""

import numpy as np
import pytest

from atlas.ops.adjust_logits import ADJUST_BIAS, ADJUST_MASK, ADJUST_PENALTIES, COUNT_PROMPT
from tests.contract.harness import Case, case
from tests.contract.inputs import normal

SLOTS = 8
CASES = [
    case("adjust_logits", "f32", vocab=vocab, logits=logits, slots=SLOTS)
    for vocab in (49152, 320, 33, 31)
    for logits in (1, 2, 8)
]


def inputs(c: Case, rng: np.random.Generator, adjust: np.ndarray) -> dict[str, np.ndarray]:
    vocab, logits = dict(c.constants)["vocab"], dict(c.dims)["logits"]
    mask = rng.integers(0, 1 << 32, c.shape("mask", spare=False), dtype=np.uint64).astype(np.uint32)
    count = rng.integers(0, 4, (SLOTS, vocab)) * (rng.random((SLOTS, vocab)) < 0.3)
    count |= np.where(rng.random((SLOTS, vocab)) < 0.3, COUNT_PROMPT, 0)
    return {
        "logits": normal(c, "logits", rng, 5.0),
        "adjust": adjust.astype(np.int32),
        "slot": rng.permutation(SLOTS)[:logits].astype(np.int32),
        "bias": (normal(c, "bias", rng, 10.0) * (rng.random((SLOTS, vocab)) < 0.1)).astype(np.float32),
        "token_count": count.astype(np.uint32).view(np.int32),
        "repetition": rng.uniform(0.5, 2.0, logits).astype(np.float32),
        "frequency": rng.uniform(-2.0, 2.0, logits).astype(np.float32),
        "presence": rng.uniform(-2.0, 2.0, logits).astype(np.float32),
        "mask_index": rng.integers(0, logits, logits).astype(np.int32),
        "mask": mask,
    }


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("start", (3, 7))
def test_matches_reference(device, case: Case, start: int, rng) -> None:
    """Rows of every combination of bits side by side, those that ask for nothing among them."""
    adjust = (np.arange(dict(case.dims)["logits"]) + start) % 8
    given = inputs(case, rng, adjust)
    # Rows that use neither slot nor mask may have none.
    given["slot"][adjust & (ADJUST_BIAS | ADJUST_PENALTIES) == 0] = -1
    given["mask_index"][adjust & ADJUST_MASK == 0] = -1
    assert device.check(case, given) <= 1.0


def test_definitions(device, rng) -> None:
    """Each token's new logit from its own history, in plain arithmetic."""
    c = case("adjust_logits", "f32", vocab=12, logits=1, slots=SLOTS)
    given = inputs(c, rng, np.array([ADJUST_BIAS | ADJUST_PENALTIES | ADJUST_MASK]))
    given["logits"][:] = [2, -2, 2, -2, 2, -2, 2, -2, 0, 1, 1, 1]
    given["slot"][:] = 3
    bias, count = np.zeros((SLOTS, 12), np.float32), np.zeros((SLOTS, 12), np.int64)
    bias[3, [9, 10]] = [5.0, -5.0]
    count[3] = [0, 0, COUNT_PROMPT, COUNT_PROMPT, 1, 3, COUNT_PROMPT + 2, COUNT_PROMPT + 2, 1, COUNT_PROMPT, 0, 0]
    given |= {"bias": bias, "token_count": count.astype(np.uint32).view(np.int32)}
    given |= {n: np.array([v], np.float32) for n, v in (("repetition", 2), ("frequency", 0.25), ("presence", 0.5))}
    given |= {"mask_index": np.array([0], np.int32), "mask": np.array([[0xFFFFF7FF]], np.uint32)}
    after = device.run(c, given)["adjusted"][0]
    expected = [2, -2, 1, -4, 1 - 0.75, -4 - 1.25, 1 - 1.0, -4 - 1.0, -0.75, 6 / 2, -4, -np.inf]
    assert np.allclose(after, expected, rtol=1e-6)
    assert device.check(c, given) <= 1.0


def test_infinities_stay_and_nan_is_not_hidden(device, rng) -> None:
    c = case("adjust_logits", "f32", vocab=64, logits=1, slots=SLOTS)
    given = inputs(c, rng, np.array([7]))
    given["logits"][0, [3, 40, 41]] = [-np.inf, np.nan, np.nan]
    given["mask"][:] = 0
    given["mask"][0, 1] = 1 << 8  # allows token 40 only
    after = device.run(c, given)["adjusted"][0]
    assert np.isnan(after[[40, 41]]).all() and (np.delete(after, [40, 41]) == -np.inf).all()
    given["adjust"][:] = ADJUST_BIAS | ADJUST_PENALTIES
    after = device.run(c, given)["adjusted"][0]
    assert after[3] == -np.inf and np.flatnonzero(np.isnan(after)).tolist() == [40, 41]
