"""LLM.logits and LLM.perplexity against transformers' stored logits, and against their definitions."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.errors import RequestError
from atlas.llm import LLM, SamplingParams
from atlas.llm.scoring import block_means, token_nll, windows
from tests import family_models
from tests.llm.test_generate import idle
from tests.models.test_smollm2 import MAX_ABS, REL_L2, relative_l2
from tests.oracle.make_families_oracle import ORACLE as FAMILIES
from tests.oracle.make_families_oracle import ROWS as FAMILY_ROWS
from tests.oracle.make_families_oracle import SEED
from tests.oracle.make_tiny_oracle import ORACLE, ROWS, checkpoint, ids


@pytest.mark.parametrize("variant", ["untied", "rope-llama3"])
@pytest.mark.parametrize("limits", [{}, {"max_rows": 37, "max_seqs": 37}, {"max_rows": 7, "max_seqs": 3}])
def test_logits_are_those_of_transformers(tmp_path: Path, variant: str, limits: dict[str, int]) -> None:
    """In any chunking; 70 sequences in one call do not disturb each other."""
    with np.load(ORACLE) as oracle:
        expected = oracle[f"{variant}.logits"]
    with LLM(checkpoint(tmp_path, variant), backend="cpu", quant="f32", **limits) as llm:
        logits = llm.logits(ids(320))
        assert (logits.dtype, logits.shape) == (np.float32, (100, 320))
        assert relative_l2(logits[list(ROWS)], expected) <= REL_L2
        assert np.abs(logits[list(ROWS)] - expected).max() <= MAX_ABS
        many = llm.logits([ids(320)[:n] for n in (1, 100, *[50] * 68)])
        assert isinstance(many, list) and [len(rows) for rows in many] == [1, 100, *[50] * 68]
        assert all(rows.tobytes() == logits[: len(rows)].tobytes() for rows in many)
        assert idle(llm)


@pytest.mark.parametrize("family", ["llama-longrope", "gemma3", "mistral-window", "phi3-long"])
def test_logits_of_families_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Windows, several RoPEs, and LongRoPE, whose frequencies follow from a sequence's whole length."""
    with np.load(FAMILIES) as oracle:
        expected = oracle[f"{family}.logits"]
    with LLM(family_models.write(tmp_path, family, SEED), backend="cpu", quant="f32", max_rows=37) as llm:
        short, logits = llm.logits([ids(family_models.VOCAB)[:20], ids(family_models.VOCAB)])
    assert relative_l2(logits[list(FAMILY_ROWS)], expected) <= REL_L2
    assert (np.abs(short - logits[:20]).max() > 1e-2) == (family in ("llama-longrope", "phi3-long"))


def nll_by_definition(llm: LLM, tokens: list[int], window: int, stride: int) -> list[float]:
    """Each token from the window that ends first among those that hold it."""
    result = []
    for target in range(1, len(tokens)):
        begin = 0 if target < window else -(-(target - window + 1) // stride) * stride
        logits = llm.logits(tokens[begin:target])[-1].astype(np.float64)
        result.append(float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[tokens[target]]))
    return result


@pytest.mark.parametrize(("window", "stride"), [(64, 32), (32, 31), (32, 1), (256, 128), (2, 1)])
def test_perplexity_is_what_it_says(llm: LLM, window: int, stride: int) -> None:
    tokens = np.random.default_rng(window).integers(7, 263, 80).tolist()
    result = llm.perplexity(tokens, window, stride)
    expected = nll_by_definition(llm, tokens, window, stride)
    assert (result.tokens, result.window, result.stride) == (79, window, stride)
    assert np.abs(result.token_nll - expected).max() < 1e-5
    assert result.nll == pytest.approx(np.mean(expected)) and result.perplexity == pytest.approx(
        np.exp(np.mean(expected))
    )
    assert result.interval == (0.0, np.inf), "one block tells nothing about spread"
    assert idle(llm)


def test_perplexity_of_a_text_begins_with_bos(llm: LLM) -> None:
    assert llm.perplexity("abc").token_nll.tolist() == llm.perplexity([1, 7 + 97, 7 + 98, 7 + 99]).token_nll.tolist()


def test_windows_score_each_token_once() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        n, window = int(rng.integers(2, 300)), int(rng.integers(2, 100))
        stride = int(rng.integers(1, window))
        scored = []
        for begin, part in windows(list(range(n)), window, stride):
            assert begin % stride == 0 and len(part.tokens) < window
            assert part.tokens == list(range(begin, begin + len(part.tokens)))
            scored += [begin + row + 1 for row in range(part.wanted_from, len(part.tokens))]
        assert scored == list(range(1, n))


def test_the_interval_covers_the_mean() -> None:
    """Independent values: 95 of 100 intervals hold the true mean, give or take."""
    from atlas.llm.scoring import mean_interval

    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = mean_interval(rng.exponential(2.0, 64 * 40))
        covered += low <= 2.0 <= high
    assert 0.90 <= covered / 400 <= 0.98
    assert len(block_means(np.zeros(63))) == 1 and len(block_means(np.zeros(200))) == 3


def test_a_nan_stays_a_nan() -> None:
    logits = np.zeros((2, 5), np.float32)
    logits[1, 3] = np.nan
    nll = token_nll(logits, np.array([0, 0]))
    assert nll[0] == pytest.approx(np.log(5)) and np.isnan(nll[1])


def test_scoring_beside_requests(llm: LLM) -> None:
    """Logits asked for while requests run, from a cache they fill: all get what they get alone."""
    params = SamplingParams(max_tokens=100, seed=4, ignore_eos=True)
    tokens = ids(256)
    alone, answers = llm.logits(tokens), [output.outputs for output in llm.generate(["a"] * 20, params)]
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append([o.outputs for o in llm.generate(["a"] * 20, params)]))
    thread.start()
    for _ in range(5):
        assert all(rows.tobytes() == alone.tobytes() for rows in llm.logits([tokens] * 20))
    thread.join()
    assert got == [answers]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.logits([[1], []]), "tokens[1]: 0 tokens"),
        (lambda llm: llm.logits([1] * 257), "tokens: 257 tokens; accepted: 1 to 256"),
        (lambda llm: llm.logits([1, 320]), "tokens[1]: token id 320"),
        (lambda llm: llm.logits("abc"), "tokens: a str"),
        (lambda llm: llm.logits(b"abc"), "tokens: a bytes"),
        (lambda llm: llm.logits(5), "tokens: a int; accepted: token ids"),
        (lambda llm: llm.logits(np.array(5)), "tokens: a ndarray"),
        (lambda llm: llm.logits([[5], "a"]), "tokens[1]: a str"),
        (lambda llm: llm.perplexity(5), "text: a int"),
        (lambda llm: llm.perplexity(b"abc"), "text: a bytes"),
        (lambda llm: llm.perplexity("\ud83d"), "text: a lone surrogate"),
        (lambda llm: llm.perplexity([1, 2], "a"), "window: 'a'"),
        (lambda llm: llm.perplexity([1, 2], 4, 2.5), "stride: 2.5"),
        (lambda llm: llm.perplexity([1]), "text: 1 tokens; accepted: at least 2"),
        (lambda llm: llm.perplexity([1, 2], 257), "window: 257"),
        (lambda llm: llm.perplexity([1, 2], 10, 10), "stride: 10"),
    ],
)
def test_errors_name_what_is_wrong(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert message in str(caught.value)
