"""The engine on the reference backend with a tiny random model: no kernel is involved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.errors import RequestError
from atlas.ops.sample import choose
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint
from tests import tiny_model

GREEDY = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


def make(model: Path, **options: object) -> Engine:
    with open_checkpoint(model) as checkpoint:
        runner = Runner.load(
            checkpoint, RunnerOptions(backend="reference", quant="f32", **{"max_seqs": 8, "max_rows": 64, **options})
        )
    return Engine(runner)


def finish(engine: Engine) -> dict[str, tuple[list[int], str | None]]:
    """Step until idle; tokens and finish reason by request."""
    result: dict[str, tuple[list[int], str | None]] = {}
    for _ in range(2000):
        if not engine.busy:
            break
        for output in engine.step():
            tokens, reason = result.get(output.request_id, ([], None))
            assert reason is None, "output after a finish reason"
            result[output.request_id] = (tokens + output.token_ids, output.finish_reason)
    assert not engine.busy and engine.pool.free == engine.pool.total
    return result


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 320, n).tolist() for n in rng.integers(1, 90, count)]


def alone(model: Path, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    engine = make(model)
    engine.add("only", list(prompt), sampling)
    return finish(engine)["only"][0]


def test_a_batch_of_mixed_lengths_equals_each_request_alone(model: Path) -> None:
    engine = make(model)
    wanted = {str(i): alone(model, prompt, GREEDY) for i, prompt in enumerate(prompts(10))}
    for i, prompt in enumerate(prompts(10)):
        engine.add(str(i), prompt, GREEDY)
    assert {name: tokens for name, (tokens, _) in finish(engine).items()} == wanted


@pytest.mark.parametrize("max_rows", [8, 13, 33])
def test_any_chunking_of_the_prompt_gives_the_same_tokens(model: Path, max_rows: int) -> None:
    for prompt in prompts(4):
        engine = make(model, max_rows=max_rows)
        engine.add("a", prompt, GREEDY)
        assert finish(engine)["a"][0] == alone(model, prompt, GREEDY)


def test_preemption_changes_no_token(model: Path) -> None:
    """KV room for 8 blocks and requests that want 5 each."""
    block = 2 * 2 * 2 * 16 * 32 * 4
    engine = make(model, kv_memory_bytes=8 * block)
    given = {str(i): prompt for i, prompt in enumerate(prompts(8))}
    sampling = {n: SamplingParams(max_tokens=30, temperature=float(int(n) % 2), seed=5) for n in given}
    for name, prompt in given.items():
        engine.add(name, prompt, sampling[name])
    results = finish(engine)
    assert engine.scheduler.preemptions > 0
    for name, prompt in given.items():
        assert results[name][0] == alone(model, prompt, sampling[name]), f"request {name}"


def test_a_draw_depends_on_seed_and_position_alone(model: Path) -> None:
    """Each token is the reference's choice for the request's seed at that token's own position."""
    engine = make(model)
    prompt, sampling = prompts(1)[0], SamplingParams(max_tokens=8, temperature=1.3, top_k=50, top_p=0.9, seed=-77)
    engine.add("a", prompt, sampling)
    length, drawn = len(prompt), 0
    while engine.busy:
        for output in engine.step():
            logits = engine.runner.read("logits")[0]
            assert output.token_ids == [choose(logits, 1.3, 50, 0.9, 0.0, -77 & (2**64 - 1), length + drawn)]
            drawn += 1
    assert drawn == 8


def test_seeds_reproduce_and_differ(model: Path) -> None:
    prompt = prompts(1)[0]
    hot = [SamplingParams(max_tokens=20, temperature=1.5, seed=seed) for seed in (1, 1, 2, -1)]
    runs = [alone(model, prompt, sampling) for sampling in hot]
    assert runs[0] == runs[1] and runs[0] != runs[2] and runs[2] != runs[3]


def test_a_stop_id_ends_a_request_and_is_reported(model: Path) -> None:
    prompt = prompts(1)[0]
    tokens = alone(model, prompt, GREEDY)
    end = tokens[4]
    first = tokens.index(end)
    engine = make(model)
    engine.add("stops", prompt, SamplingParams(max_tokens=12, stop_token_ids=(319, end)))
    engine.add("runs on", prompt, GREEDY)
    results = finish(engine)
    assert results["stops"] == (tokens[: first + 1], "stop")
    assert results["runs on"] == (tokens, "length")


def test_the_context_is_filled_to_the_last_token(model: Path) -> None:
    engine = make(model)
    context = engine.runner.max_context
    for length in (context - 1, context - 2, 200):
        engine.add(str(length), [7] * length, SamplingParams(max_tokens=10_000))
    for name, (tokens, reason) in finish(engine).items():
        assert (len(tokens), reason) == (context - int(name), "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], GREEDY, "prompt: 0 tokens; accepted: 1..255"),
        ([1] * 256, GREEDY, "prompt: 256 tokens; accepted: 1..255: the context holds 256 tokens"),
        ([1, 320], GREEDY, "prompt: token id 320; accepted: 0..319"),
        ([-1], GREEDY, "prompt: token id -1"),
        ([1], SamplingParams(max_tokens=-1), "max_tokens: -1"),
        ([1], SamplingParams(max_tokens=1, temperature=float("nan")), "temperature: nan"),
        ([1], SamplingParams(max_tokens=1, temperature=-1.0), "temperature: -1.0"),
        ([1], SamplingParams(max_tokens=1, top_p=1.5), "top_p: 1.5"),
        ([1], SamplingParams(max_tokens=1, seed=1 << 63), "seed: 9223372036854775808"),
    ],
)
def test_a_bad_request_is_refused_and_harms_no_other(
    model: Path, prompt: list[int], sampling: SamplingParams, message: str
) -> None:
    engine = make(model)
    good = prompts(1)[0]
    engine.add("good", good, GREEDY)
    with pytest.raises(RequestError) as caught:
        engine.add("bad", prompt, sampling)
    assert message in str(caught.value)
    assert finish(engine)["good"][0] == alone(model, good, GREEDY)


def test_an_id_in_use_is_refused(model: Path) -> None:
    engine = make(model)
    engine.add("a", [1], GREEDY)
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add("a", [2], GREEDY)


def test_aborts_at_random_leave_nothing_behind(model: Path) -> None:
    rng = np.random.default_rng(3)
    engine = make(model)
    given = {str(i): prompt for i, prompt in enumerate(prompts(32))}
    for name, prompt in given.items():
        engine.add(name, prompt, GREEDY)
    done: dict[str, list[int]] = {}
    aborted = set()
    while engine.busy:
        for output in engine.step():
            assert output.request_id not in aborted
            done.setdefault(output.request_id, []).extend(output.token_ids)
        if rng.random() < 0.5:
            name = str(rng.integers(32))
            engine.abort(name)
            if name not in done or len(done[name]) < 12:
                aborted.add(name)
    engine.abort("never existed")
    assert engine.stats().free_blocks == engine.stats().total_blocks
    finished = {name for name, tokens in done.items() if len(tokens) == 12}
    assert finished and aborted - finished
    for name in sorted(finished)[:4]:
        assert done[name] == alone(model, given[name], GREEDY)


def test_logits_that_are_no_numbers_fail_their_request_only(model: Path) -> None:
    """A NaN in one row of the token table reaches only the requests that use it."""
    engine = make(model)
    table = engine.runner.read("embedding.weight")
    table[77] = np.nan
    engine.runner.backend.write(engine.runner.plan.offsets["embedding.weight"], table)
    engine.add("bad", [5, 77, 6], GREEDY)
    engine.add("good", [5, 6], GREEDY)
    outputs: list[SequenceOutput] = []
    while engine.busy:
        outputs += engine.step()
    bad = [output for output in outputs if output.request_id == "bad"]
    assert [(o.token_ids, o.finish_reason) for o in bad] == [([], "error")]
    assert bad[0].error and "not finite" in bad[0].error
    assert len([o for o in outputs if o.request_id == "good"]) == 12
