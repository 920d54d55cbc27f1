"""What bench/real_weights.py measures, on a tiny model and the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atlas.llm.scoring import token_nll
from atlas.runtime.runner import Runner
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL
from atlas.targets.formats import FORMATS
from atlas.weights.e4m3 import round_rows
from bench import real_weights
from tests import tiny_model
from tests.models import run
from tests.models.test_smollm2 import LEAD_NOISE


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = tiny_model.write(tmp_path_factory.mktemp("model") / "tiny")
    sizes: dict[str, Any] = {"max_seqs": 4, "max_rows": 16, "max_logits": 16, "kv_memory_bytes": 4 << 20}
    return run.load(path, "cpu", "f32", **sizes, max_context=64)


@pytest.mark.parametrize("phase", [PHASE_PREFILL, PHASE_DECODE])
def test_windows_are_scored_as_one_sequence_each(runner: Runner, phase: int) -> None:
    windows = np.random.default_rng().integers(0, 320, (3, 41)).astype(np.int32)
    found = real_weights.score(runner, windows, phase)
    for window, nll in zip(windows, found, strict=True):
        logits = run.logits(runner, window[:-1].tolist(), chunk=16)
        np.testing.assert_allclose(nll, token_nll(logits, window[1:]), rtol=1e-5)


def _oracle(runner: Runner, prompts: list[list[int]], count: int) -> dict[str, Any]:
    tokens = run.greedy(runner, prompts, count, together=len(prompts))
    logits = [run.logits(runner, p + t, chunk=16)[len(p) - 1 : -1] for p, t in zip(prompts, tokens, strict=True)]
    best = [np.sort(each, 1)[:, ::-1] for each in logits]
    return {
        "prompt_lengths": np.array([len(p) for p in prompts]),
        "prompts": np.concatenate([np.array(p) for p in prompts]),
        "tokens": np.array(tokens),
        "seconds": np.array([np.argsort(each, 1)[:, -2] for each in logits]),
        "leads": np.array([each[:, 0] - each[:, 1] for each in best]),
    }


def test_a_token_may_differ_only_within_the_noise(runner: Runner) -> None:
    rng = np.random.default_rng()
    prompts = [rng.integers(0, 320, length).tolist() for length in (5, 1, 17)]
    expected = _oracle(runner, prompts, 8)
    same = real_weights.greedy(runner, expected)
    assert same["first_differences"] == [] and same["passed"] and same["noise"] < 1e-4

    # The last token, so that nothing follows from it: the oracle is said to prefer the runner-up.
    swapped = {name: values.copy() for name, values in expected.items()}
    swapped["tokens"][1, -1], swapped["seconds"][1, -1] = expected["seconds"][1, -1], expected["tokens"][1, -1]
    found = real_weights.greedy(runner, swapped)
    lead = round(float(expected["leads"][1, -1]), 5)
    assert found["first_differences"] == [{"prompt": 1, "token": 7, "lead": lead}]
    assert found["passed"] == (lead < min(found["noise"], LEAD_NOISE))

    swapped["leads"][0, 0] += 2 * lead  # a side as noisy as that may prefer another token, within limits
    assert real_weights.greedy(runner, swapped)["passed"] == (lead < LEAD_NOISE)


def test_perplexities_are_compared_in_percent() -> None:
    expected = np.random.default_rng().uniform(1, 5, (4, 200))
    found = real_weights.compared(expected + np.log(1.01), expected, expected - np.log(1.02))
    assert found["against_oracle_percent"] == pytest.approx([1.0, 1.0, 1.0], abs=2e-4)
    assert found["against_original_percent"][0] == pytest.approx(100 * (1.01 * 1.02 - 1), abs=2e-4)


def test_the_oracle_rounds_activations_as_the_format_says() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict({"down": torch.nn.Linear(200, 200, bias=False)})
    with torch.no_grad():
        model["down"].weight.copy_(torch.eye(200))
    real_weights.round_activations(model)
    rows = np.random.default_rng().standard_normal((7, 200)).astype(np.float32) * 10
    rows[3, :128] = 0
    codes, scales = round_rows(rows, FORMATS["f8g128"])
    expected = (codes.astype(np.float32).reshape(7, 2, 128) * scales[:, :, None]).reshape(7, 256)[:, :200]
    with torch.no_grad():
        found = model["down"](torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
