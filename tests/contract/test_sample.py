"""sample against its reference, its own arithmetic against published values, and its distribution."""

import numpy as np
import pytest

from atlas.ops.adjust_logits import ADJUST_BIAS, ADJUST_PENALTIES
from atlas.ops.sample import INVALID_TOKEN, kept_probabilities, philox4x32
from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [case("sample", "f32", vocab=vocab, logits=logits, slots=8) for vocab in (49152, 320, 37) for logits in (1, 5)]
CASES.append(case("sample", "f32", vocab=320, logits=512, slots=8))


def inputs(
    c: Case,
    rng: np.random.Generator,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    logits: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Every second row is adjusted: its `logits` are poison, and its slot counts tokens if it has one."""
    count = dict(c.dims)["logits"]
    raw = normal(c, "logits", rng, 3.0) if logits is None else logits
    adjust = np.arange(count) % 4 // 2 * rng.integers(1, 8, count)
    adjusted = np.where(adjust[:, None] != 0, raw, np.nan).astype(np.float32)
    raw = np.where(adjust[:, None] == 0, raw, np.nan).astype(np.float32)
    slots = np.full(count, -1, np.int32)
    slots[: min(count, 8)] = rng.permutation(8)[: min(count, 8)]
    return {
        "logits": raw,
        "adjusted": adjusted,
        "adjust": adjust.astype(np.int32),
        "temperature": np.full(count, temperature, np.float32),
        "top_k": np.full(count, top_k, np.int32),
        "top_p": np.full(count, top_p, np.float32),
        "min_p": np.full(count, min_p, np.float32),
        "seed": rng.integers(-(1 << 63), (1 << 63) - 1, count),
        "position": rng.integers(0, 100_000, count).astype(np.int32),
        "slot": slots,
        "last_token": np.full(8, 7, np.int32),
        "token_count": rng.integers(-(1 << 31), 1 << 30, (8, dict(c.constants)["vocab"])).astype(np.int32),
    }


def source(given: dict[str, np.ndarray]) -> np.ndarray:
    """The logits that each row is sampled from."""
    return np.where(given["adjust"][:, None] != 0, given["adjusted"], given["logits"])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "how",
    [
        (0.0, 0, 1.0),
        (0.7, 0, 1.0),
        (1.0, 40, 1.0),
        (1.3, 0, 0.9),
        (0.8, 20, 0.95),
        (1.0, 1, 1.0),
        (1.0, 0, 0.0),
        (1.0, 0, 0.9999999),
        (1.0, 700, 0.999),  # more than the 64-token blocks of a small vocabulary
        (1.0, 1 << 30, 0.5),
        (1e4, 40, 1.0),  # without top_k the last bit of a weight would decide: all are almost 1
        (1e-7, 3, 0.5, 0.5),
        (1.0, 0, 1.0, 0.02),
        (2.0, 50, 0.9, 0.3),
        (1.0, 0, 1.0, 1.0),
        (1.0, 0, 1.0, 0.0),
    ],
    ids=str,
)
def test_matches_reference(device, case: Case, how: tuple[float, ...], rng) -> None:
    assert device.check(case, inputs(case, rng, *how)) == 0.0


def test_greedy_takes_the_first_of_equal_logits(device, rng) -> None:
    c = case("sample", "f32", vocab=320, logits=5, slots=8)
    logits = normal(c, "logits", rng)
    for row, ids in enumerate(([0, 319], [5, 6], [31, 32, 33], [318, 319], [100])):
        logits[row, ids] = 50.0
    after = device.run(c, inputs(c, rng, logits=logits))
    assert after["token"][:5].tolist() == [0, 5, 31, 318, 100]


def test_ties_at_the_threshold_are_kept(device, rng) -> None:
    """Two of three equal logits cannot be told apart, so top_k 2 must keep all three."""
    c = case("sample", "f32", vocab=320, logits=512, slots=8)
    logits = np.full((512, 320), -5.0, np.float32)
    logits[:, [7, 70, 200]] = 4.0
    for how in ((1.0, 2, 1.0), (1.0, 0, 0.5)):
        tokens = device.run(c, inputs(c, rng, *how, logits=logits))["token"][:512]
        assert set(tokens.tolist()) == {7, 70, 200}


@pytest.mark.parametrize("temperature", [1e-7, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy(device, temperature: float, rng) -> None:
    """Dividing first would overflow, and inf - inf is no distribution."""
    c = case("sample", "f32", vocab=320, logits=5, slots=8)
    given = inputs(c, rng, temperature, 0, 0.95, logits=normal(c, "logits", rng, 20.0))
    assert device.run(c, given)["token"][:5].tolist() == source(given).argmax(axis=1).tolist()
    assert device.check(c, given) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_reported(device, bad: float, rng) -> None:
    """One bad row yields INVALID_TOKEN; its neighbours are sampled as ever."""
    c = case("sample", "f32", vocab=320, logits=5, slots=8)
    given = inputs(c, rng, 1.0, 5, 0.9)
    given["adjusted"][2, 319] = bad
    given["logits"][4] = -np.inf
    tokens = device.run(c, given)["token"][:5]
    assert (tokens == INVALID_TOKEN).tolist() == [False, False, True, False, True]
    assert device.check(c, given) == 0.0


def test_draws_follow_the_distribution(device, rng) -> None:
    """Chi-square of 512 draws over 6 likely tokens, and none outside the kept set."""
    c = case("sample", "f32", vocab=320, logits=512, slots=8)
    row = np.full(320, -30.0, np.float32)
    row[10:18] = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5]
    kept = kept_probabilities(row, 1.0, 6, 1.0, 0.0)
    tokens = device.run(c, inputs(c, rng, 1.0, 6, 1.0, logits=np.tile(row, (512, 1))))["token"][:512]
    expected = kept / kept.sum() * 512
    counts = np.bincount(tokens, minlength=320)
    assert counts[expected == 0].sum() == 0
    chi_square = (((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum()
    assert chi_square < 36.0  # 5 degrees of freedom: p < 1e-6


def test_all_but_one_forbidden_leaves_that_one(device, rng) -> None:
    c = case("sample", "f32", vocab=320, logits=8, slots=8)
    logits = np.full((8, 320), -np.inf, np.float32)
    allowed = rng.integers(0, 320, 8)
    logits[np.arange(8), allowed] = rng.uniform(-1e30, 1e30, 8)
    for how in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.1), (1e4, 0, 0.0, 1.0), (1e-7, 0, 0.5, 0.0)):
        given = inputs(c, rng, *how, logits=logits)
        assert device.run(c, given)["token"][:8].tolist() == allowed.tolist(), how
        assert device.check(c, given) == 0.0


def test_tokens_of_rows_with_penalties_are_counted(device, rng) -> None:
    c = case("sample", "f32", vocab=37, logits=4, slots=8)
    given = inputs(c, rng, 1.0)
    given["adjust"] = np.array([ADJUST_PENALTIES, 0, ADJUST_BIAS, 7], np.int32)
    given["adjusted"] = given["logits"] = normal(c, "logits", rng)
    given["slot"] = np.array([5, 1, 2, -1], np.int32)
    after = device.run(c, given)
    expected = given["token_count"].copy()
    expected[5, after["token"][0]] += 1
    assert (after["token_count"] == expected).all()
    assert after["last_token"][[5, 1, 2]].tolist() == after["token"][:3].tolist()
    assert device.check(c, given) == 0.0


def test_min_p_comes_after_temperature(device, rng) -> None:
    """At temperature 2 the probabilities are 1 : e^-0.25 : e^-0.5 : e^-0.75, so min_p 0.5 keeps three of four."""
    c = case("sample", "f32", vocab=320, logits=512, slots=8)
    logits = np.full((512, 320), -40.0, np.float32)
    logits[:, [3, 4, 5, 6]] = [1.0, 0.5, 0.0, -0.5]
    tokens = device.run(c, inputs(c, rng, 2.0, 0, 1.0, 0.5, logits=logits))["token"][:512]
    assert set(tokens.tolist()) == {3, 4, 5}


def test_philox_known_answers() -> None:
    """First words of philox4x32-10 in Random123's own test vectors that have the counter form used here."""
    assert philox4x32(0, 0) == 0x6627E8D5
