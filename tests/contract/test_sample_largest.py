"""sample_largest against its reference and against sample, of greedy and other rows in one batch."""

from __future__ import annotations

import numpy as np
import pytest

from atlas.ops import OPS
from atlas.ops.normed_logits import largest_of
from atlas.ops.sample import INVALID_TOKEN
from tests.contract import test_sample
from tests.contract.harness import Case, case

CASES = [
    case("sample_largest", "f32", vocab=vocab, logits=logits, slots=8)
    for vocab in (49152, 320, 37)
    for logits in (1, 5, 64)
]


def inputs(c: Case, rng: np.random.Generator, logits: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Some rows greedy, some not, some of each adjusted. What is not read is poison."""
    given = test_sample.inputs(c, rng, top_k=40, logits=logits)
    count = len(given["temperature"])
    given["temperature"] = rng.permutation(np.resize(np.float32([0.0, 0.7, 0.0, -1.0]), count))
    given["largest"], given["largest_id"] = largest_of(given["logits"])
    greedy = (given["temperature"] <= 0) & (given["adjust"] == 0)
    given["logits"] = np.where(greedy[:, None], np.nan, given["logits"]).astype(np.float32)
    given["largest"][~greedy] = np.nan
    return given


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    for _ in range(4):
        assert device.check(case, inputs(case, rng)) == 0.0


def test_greedy_takes_the_first_of_equal_logits(device, rng) -> None:
    c = case("sample_largest", "f32", vocab=49152, logits=6, slots=8)
    logits = rng.standard_normal((6, 49152)).astype(np.float32)
    first = rng.integers(0, 49152 - 40, 6)
    for row, at in enumerate(first):
        logits[row, [at, at + 1, at + 33, 49151]] = 9.0
    given = inputs(c, rng, logits)
    given["temperature"][:] = given["adjust"][:] = 0
    given["largest"], given["largest_id"] = largest_of(logits)
    assert device.run(c, given)["token"][:6].tolist() == first.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_greedy_reports_rows_without_an_answer(device, bad: float, rng) -> None:
    c = case("sample_largest", "f32", vocab=320, logits=4, slots=8)
    logits = rng.standard_normal((4, 320)).astype(np.float32)
    logits[1, 317], logits[3] = bad, -np.inf
    given = inputs(c, rng, logits)
    given["temperature"][:] = given["adjust"][:] = 0
    given["largest"], given["largest_id"] = largest_of(logits)
    found = device.run(c, given)["token"][:4]
    assert found.tolist() == [int(np.argmax(logits[0])), INVALID_TOKEN, int(np.argmax(logits[2])), INVALID_TOKEN]


def test_reference_is_that_of_sample() -> None:
    rng = np.random.default_rng()
    c = case("sample_largest", "f32", vocab=200, logits=16, slots=8)
    logits = rng.standard_normal((16, 200)).astype(np.float32)
    given, dims, constants = inputs(c, rng, logits), {"logits": 16, "slots": 8}, {"vocab": 200}
    tokens = []
    for op, changes in (("sample", {"logits": logits}), ("sample_largest", {})):
        state = {name: given[name].copy() for name in ("last_token", "token_count")}
        arrays = {**given, **changes, **state, "token": np.zeros(16, np.int32)}
        OPS[op].reference(arrays, dims, constants)
        tokens.append((arrays["token"].tolist(), arrays["last_token"].tolist(), arrays["token_count"].tolist()))
    assert tokens[0] == tokens[1]
