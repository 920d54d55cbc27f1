"""Every sampling parameter through the engine, against plain NumPy over the raw logits of each step.

A tiny random model on the reference backend and on the CPU's own kernels. Batches, chunks and preemption
must change nothing.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.engine.sampling import choice_seed
from atlas.errors import RequestError
from atlas.ops.sample import choose
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint
from tests import tiny_model

VOCAB = 320
BLOCK_BYTES = 2 * 2 * 2 * 16 * 32 * 4
BACKENDS = ["reference", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


def make(model: Path, backend: str = "cpu", **options: object) -> Engine:
    with open_checkpoint(model) as checkpoint:
        runner = Runner.load(
            checkpoint, RunnerOptions(backend=backend, quant="f32", **{"max_seqs": 8, "max_rows": 64, **options})
        )
    return Engine(runner)


def finish(engine: Engine) -> dict[str, SequenceOutput]:
    """Step until idle; all outputs of each request as one."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(4000):
        if not engine.busy:
            break
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert not engine.busy and engine.pool.free == engine.pool.total
    return {name: SequenceOutput.join(parts) for name, parts in outputs.items()}


def alone(model: Path, prompt: list[int], params: SamplingParams, backend: str = "cpu") -> SequenceOutput:
    engine = make(model, backend)
    engine.add("only", list(prompt), params)
    return finish(engine)["only"]


def prompts(count: int, seed: int = 5, longest: int = 70) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, longest, count)]


MANY: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"temperature": 1.4, "seed": 3},
    "narrow": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "seed": -9},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "seed": 5,
    },
    "repetition, greedy": {"repetition_penalty": 1.3},
    "frequency, greedy": {"frequency_penalty": 2.0},
    "presence rewarded": {"presence_penalty": -1.5},
    "bias": {"logit_bias": {7: 4.0, 200: -100.0, 319: 2.5}, "temperature": 1.0, "seed": 11},
    "bias and penalties": {"logit_bias": {9: 30.0}, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 320, 2)), "temperature": 1.5, "seed": 1},
    "logprobs": {"temperature": 1.0, "seed": 8, "logprobs": 5, "prompt_logprobs": 3, "repetition_penalty": 1.1},
}


def params(name: str, max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **MANY[name])


def expected_token(logits: np.ndarray, sequence: list[int], prompt: int, p: SamplingParams) -> int:
    """The next token by the documented order, one token of the vocabulary at a time."""
    x = logits.astype(np.float32).copy()
    for token, bias in p.logit_bias.items():
        x[token] += np.float32(bias)
    generated = Counter(sequence[prompt:])
    for token in set(sequence) if p.penalises else ():
        x[token] = (
            x[token] / np.float32(p.repetition_penalty) if x[token] > 0 else x[token] * np.float32(p.repetition_penalty)
        )
        x[token] -= np.float32(p.frequency_penalty) * generated[token]
        x[token] -= np.float32(p.presence_penalty) * (generated[token] > 0)
    if len(sequence) - prompt < p.min_tokens:
        x[list(p.stop_token_ids)] = -np.inf
    return choose(x, p.temperature, p.top_k, p.top_p, p.min_p, p.seed % 2**64, len(sequence))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MANY)
def test_each_token_follows_from_the_raw_logits(model: Path, backend: str, name: str) -> None:
    engine = make(model, backend)
    p, sequence = params(name), prompts(1, seed=len(name))[0]
    prompt = len(sequence)
    engine.add("a", list(sequence), p)
    while engine.busy:
        for output in engine.step():
            if output.token_ids:
                row = engine.runner.block.symbols()["n_logits"] - 1
                logits = engine.runner.read("logits")[row]
                assert output.token_ids == [expected_token(logits, sequence, prompt, p)], (
                    f"token {len(sequence) - prompt}"
                )
                sequence += output.token_ids
    assert len(sequence) - prompt == 20 or sequence[-1] in p.stop_token_ids


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_chunks_and_preemption_change_nothing(model: Path, backend: str) -> None:
    """Room for 9 blocks, rows for 24, logits for 8; each request alone has all it wants."""
    engine = make(model, backend, kv_memory_bytes=9 * BLOCK_BYTES, max_rows=24, max_context=128)
    given = dict(zip(MANY, prompts(len(MANY)), strict=True))
    for name, prompt in given.items():
        engine.add(name, prompt, params(name, 40))
    results = finish(engine)
    assert engine.scheduler.preemptions > 3
    for name, prompt in given.items():
        expected = alone(model, prompt, params(name, 40), backend)
        if backend == "cpu":
            same = msgspec.structs.replace(expected, request_id=name, timing=results[name].timing)
            assert results[name] == same, name
            continue
        # NumPy's products differ in the last bits with the number of rows: same tokens, near numbers.
        assert results[name].token_ids == expected.token_ids, name
        for got, wanted in zip(
            results[name].prompt_logprobs + results[name].logprobs,
            expected.prompt_logprobs + expected.logprobs,
            strict=True,
        ):
            assert (got.token_id, got.top_ids) == (wanted.token_id, wanted.top_ids)
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_are_the_raw_log_softmax(model: Path, backend: str) -> None:
    engine = make(model, backend, max_rows=16)
    prompt = prompts(1, seed=9, longest=60)[0] + [3, 4]
    p = SamplingParams(
        max_tokens=6, temperature=1.2, seed=4, logprobs=3, prompt_logprobs=20, frequency_penalty=1.0, top_k=5
    )
    engine.add("a", prompt, p)
    rows: list[np.ndarray] = []
    outputs = []
    while engine.busy:
        outputs += engine.step()
        rows += list(engine.runner.read("logits")[: engine.runner.block.symbols()["n_logits"]].astype(np.float64))
    whole = SequenceOutput.join(outputs)
    sequence = prompt + whole.token_ids
    assert len(whole.prompt_logprobs) == len(prompt) - 1 and len(whole.logprobs) == 6
    assert len(rows) == len(sequence) - 1, "no row of logits but those that were asked for"
    for row, report, token in zip(rows, whole.prompt_logprobs + whole.logprobs, sequence[1:], strict=True):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert report.token_id == token and report.logprob == pytest.approx(logprobs[token], abs=1e-5)
        order = np.argsort(-row, kind="stable")
        assert report.rank == order.tolist().index(token) + 1
        n_top = len(report.top_ids)
        assert report.top_ids == order[:n_top].tolist()
        assert report.top_logprobs == pytest.approx(logprobs[order[:n_top]].tolist(), abs=1e-5)
    assert [len(r.top_ids) for r in whole.prompt_logprobs + whole.logprobs] == [20] * (len(prompt) - 1) + [3] * 6


def test_prompt_logprobs_keep_to_the_logits_of_a_step(model: Path) -> None:
    """Six prompts of 40 tokens, 3 rows of logits a step: never more, and every one of them arrives."""
    engine = make(model, max_seqs=3, max_logits=3, max_rows=32)
    given = {str(i): [i + 1] * 40 for i in range(6)}
    for name, prompt in given.items():
        engine.add(name, prompt, SamplingParams(max_tokens=3, prompt_logprobs=0 if int(name) % 2 else None, logprobs=0))
    results = finish(engine)
    for name, prompt in given.items():
        reports = results[name].prompt_logprobs
        assert [r.token_id for r in reports] == (prompt[1:] if int(name) % 2 else [])
        assert results[name].token_ids == alone(model, prompt, SamplingParams(max_tokens=3)).token_ids
        assert all(r.top_ids == [] and r.logprob < 0 for r in reports + results[name].logprobs)


def test_no_tokens_may_be_asked_for(model: Path) -> None:
    """max_tokens 0 computes the prompt only: for scoring."""
    prompt = prompts(1)[0]
    output = alone(model, prompt, SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (output.token_ids, output.logprobs, output.finish_reason) == ([], (), "length")
    longer = alone(model, prompt, SamplingParams(max_tokens=3, prompt_logprobs=1))
    assert output.prompt_logprobs == longer.prompt_logprobs and len(output.prompt_logprobs) == len(prompt) - 1


def test_min_tokens_only_delays_the_end(model: Path) -> None:
    prompt = prompts(1)[0]
    free = alone(model, prompt, SamplingParams(max_tokens=12)).token_ids
    stop = free[2]
    short = alone(model, prompt, SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    assert short.finish_reason == "stop" and short.token_ids == free[: free.index(stop) + 1]
    long = alone(model, prompt, SamplingParams(max_tokens=12, stop_token_ids=(stop,), min_tokens=8))
    assert len(long.token_ids) >= 8 and stop not in long.token_ids[:8]
    whole = alone(model, prompt, SamplingParams(max_tokens=12, stop_token_ids=(stop,), min_tokens=12))
    assert len(whole.token_ids) == 12 and whole.finish_reason == "length" and stop not in whole.token_ids


def test_a_slot_remembers_nothing_of_its_last_owner(model: Path) -> None:
    """One slot, used by a request with every kind of state and then by others."""
    engine = make(model, max_seqs=1)
    prompt = prompts(1)[0]
    for name in ("bias and penalties", "penalties", "greedy", "repetition, greedy", "bias"):
        engine.add(name, prompt, params(name))
        assert finish(engine)[name].token_ids == alone(model, prompt, params(name)).token_ids, name


def test_a_nan_in_the_prompt_fails_a_request_for_its_logprobs(model: Path) -> None:
    engine = make(model)
    table = engine.runner.read("embedding.weight")
    table[77] = np.nan
    engine.runner.write("embedding.weight", table)
    engine.add("bad", [5, 6, 77, 6, 9], SamplingParams(max_tokens=5, prompt_logprobs=1, min_tokens=2))
    engine.add("good", [5, 6], SamplingParams(max_tokens=5, prompt_logprobs=1))
    results = finish(engine)
    assert results["bad"].finish_reason == "error" and "position" in (results["bad"].error or "")
    assert len(results["good"].token_ids) == 5 and len(results["good"].prompt_logprobs) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_p": 1.5}, "min_p: 1.5"),
        ({"min_p": float("nan")}, "min_p: nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0; accepted: a number from 0.01 to 100"),
        ({"presence_penalty": -2.5}, "presence_penalty: -2.5"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty: inf"),
        ({"logit_bias": {320: 1.0}}, "logit_bias: token id 320; accepted: 0..319"),
        ({"logit_bias": {1: 101.0}}, "logit_bias: 101.0 for token id 1"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias: nan for token id 1"),
        ({"min_tokens": 6}, "min_tokens: 6; accepted: an integer from 0 to max_tokens"),
        ({"min_tokens": -1}, "min_tokens: -1"),
        ({"logprobs": 21}, "logprobs: 21; accepted: an integer from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: -1"),
        ({"stop_token_ids": (5, 320)}, "stop_token_ids[1]: 320"),
        ({"temperature": 101.0}, "temperature: 101.0"),
        ({"top_k": -1}, "top_k: -1"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(320))}, "min_tokens: 1, and every token"),
    ],
)
def test_values_out_of_range_are_refused_by_name(model: Path, wrong: dict[str, Any], message: str) -> None:
    engine = make(model, "reference")
    with pytest.raises(RequestError) as caught:
        engine.add("bad", [1], SamplingParams(**{"max_tokens": 5, **wrong}))
    assert message in str(caught.value)
    assert not engine.busy


def test_a_top_k_beyond_any_vocabulary_keeps_all(model: Path) -> None:
    """The step block holds 32 bits of it; a larger number must not end the engine."""
    engine = make(model, "reference")
    for name, top_k in (("all", 0), ("more", 2**31), ("most", 10**30)):
        engine.add(name, [1, 2, 3], SamplingParams(max_tokens=4, temperature=1.5, seed=3, top_k=top_k))
    tokens = [output.token_ids for output in finish(engine).values()]
    assert len(tokens) == 3 and tokens[0] == tokens[1] == tokens[2]


def test_choices_have_seeds_of_their_own() -> None:
    """Choice 0 keeps the seed; others of neighbouring requests do not collide; all are 64-bit integers."""
    seeds = [choice_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2, 2**63 - 1) for index in range(50)]
    assert len(set(seeds)) == len(seeds) and all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert choice_seed(42, 0) == 42
    # SplitMix64's own sequence from state 0: its first output is what index 1 gives.
    assert choice_seed(0, 1) % 2**64 == 0xE220A8397B1DCDAF
