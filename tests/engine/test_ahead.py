"""Working ahead and phases: whatever is in flight when the host schedules a step, every request gets the tokens and
log-probabilities that it gets alone, one step at a time. On the reference backend with a tiny random model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL, ROW_DECODE
from atlas.weights import open_checkpoint
from tests import tiny_model

MODES = [(1, 0), (0, 4), (1, 4), (2, 4)]
"""(steps ahead, rows of a decode step): what a backend with its own clock, or with phases, makes of the engine. With
phases go the programs of such a backend, whose greedy rows leave no logits."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


def make(model: Path, ahead: int, decode_rows: int, **options: object) -> Engine:
    with open_checkpoint(model) as checkpoint:
        runner = Runner.load(
            checkpoint,
            RunnerOptions(
                backend="reference",
                quant="f32",
                programs="cuda" if decode_rows else "",
                **{"max_seqs": 8, "max_rows": 24, **options},
            ),
        )
    runner.work_ahead(ahead)
    runner.decode_rows = decode_rows
    return Engine(runner)


def finish(engine: Engine) -> dict[str, list[SequenceOutput]]:
    """Outputs by request, in order."""
    found: dict[str, list[SequenceOutput]] = {}
    for _ in range(3000):
        if not engine.busy:
            break
        for output in engine.step():
            outputs = found.setdefault(output.request_id, [])
            assert not outputs or outputs[-1].finish_reason is None, "output after a finish reason"
            outputs.append(output)
    assert not engine.busy and engine.pool.free == engine.pool.total
    engine.pool.check_integrity()
    return found


def requests(seed: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Every kind of sampling that keeps state on the device or needs the host between two steps."""
    rng = np.random.default_rng(seed)
    kinds = [
        {},
        {"temperature": 1.2, "seed": 11},
        {"max_tokens": 1},
        {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"logit_bias": {5: 4.0, 9: 3.5}},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"min_tokens": 4, "stop_token_ids": tuple(range(0, 320, 2))},
        {"stop_token_ids": tuple(range(0, 320, 3))},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"max_tokens": 17, "seed": 8, "temperature": 1.0, "min_p": 0.01},
    ]
    return {
        str(i): (
            rng.integers(0, 320, int(rng.integers(1, 70))).tolist(),
            SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **kind}),
        )
        for i, kind in enumerate(kinds)
    }


def told(outputs: list[SequenceOutput]) -> tuple[list[int], str | None, object]:
    """Tokens, finish reason, and the log-probabilities of prompt and text, which NumPy's sums leave uncertain."""
    logprobs = [entry.logprob for o in outputs for entry in (*o.prompt_logprobs, *o.logprobs)]
    return [token for o in outputs for token in o.token_ids], outputs[-1].finish_reason, pytest.approx(logprobs, 1e-4)


def check(
    model: Path, given: dict[str, tuple[list[int], SamplingParams]], found: dict[str, list[SequenceOutput]]
) -> None:
    """Hold outputs against what each request gets alone."""
    engine = make(model, 0, 0)
    for name, (prompt, sampling) in given.items():
        engine.add(name, prompt, sampling)
        tokens, reason, logprobs = told(finish(engine)[name])
        outputs = found[name]
        assert told(outputs)[:2] == (tokens, reason), f"request {name}"
        assert [entry.logprob for o in outputs for entry in (*o.prompt_logprobs, *o.logprobs)] == logprobs, name


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_batch_equals_each_request_alone(model: Path, mode: tuple[int, int]) -> None:
    given = requests(1)
    engine = make(model, *mode)
    for name, (prompt, sampling) in given.items():
        engine.add(name, prompt, sampling)
    check(model, given, finish(engine))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_preemption_changes_no_token(model: Path, mode: tuple[int, int]) -> None:
    """KV room for 9 blocks; each request wants up to 6."""
    block = 2 * 2 * 2 * 16 * 32 * 4
    given = {name: request for name, request in requests(2).items() if name not in "58"}
    engine = make(model, *mode, kv_memory_bytes=9 * block)
    for name, (prompt, sampling) in given.items():
        engine.add(name, prompt, sampling)
    outputs = finish(engine)
    assert engine.scheduler.preemptions > 0
    check(model, given, outputs)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_requests_that_come_and_go_leave_the_others_alone(model: Path, mode: tuple[int, int]) -> None:
    given = requests(3)
    engine, rng = make(model, *mode), np.random.default_rng(4)
    waiting, found = list(given), {}
    while waiting or engine.busy:
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            engine.add(name, *given[name])
        if rng.random() < 0.3:
            engine.add("doomed", list(range(int(rng.integers(1, 50)))), SamplingParams(max_tokens=30))
            for _ in range(int(rng.integers(0, 4))):
                for output in engine.step():
                    found.setdefault(output.request_id, []).append(output)
            engine.abort("doomed")
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    check(model, given, found)
    assert engine.pool.free == engine.pool.total


def test_a_step_has_rows_of_one_phase_and_each_token_keeps_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt tokens are computed in prefill steps and generated ones in decode steps, also after a preemption."""
    block = 2 * 2 * 2 * 16 * 32 * 4
    engine = make(model, 1, 4, kv_memory_bytes=9 * block)
    lengths, seen = {}, set()
    submit = engine.runner.submit

    def watch(*arguments: object) -> object:
        step = engine.runner.block
        symbols = step.symbols()
        assert symbols["n_rows"] <= (4 if step.phase == PHASE_DECODE else 24)
        by_slot = {sequence.slot: sequence for sequence in engine.scheduler.running}
        for row in range(symbols["n_rows"]):
            sequence = by_slot[int(step.seq_slot[step.row_seq[row]])]
            generated = int(step.row_position[row]) >= lengths[sequence.request_id]
            assert step.phase == (PHASE_DECODE if generated else PHASE_PREFILL)
            seen.add((step.phase, int(step.row_kind[row]) == ROW_DECODE))
        return submit(*arguments)

    monkeypatch.setattr(engine.runner, "submit", watch)
    for name, (prompt, sampling) in requests(2).items():
        lengths[name] = len(prompt)
        engine.add(name, prompt, sampling)
    finish(engine)
    assert engine.scheduler.preemptions > 0
    assert {(PHASE_PREFILL, False), (PHASE_DECODE, True), (PHASE_DECODE, False)} <= seen, "some token was recomputed"


def test_the_next_step_is_submitted_before_tokens_are_collected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(model, 1, 4)
    log: list[str] = []
    for what in ("submit", "collect"):
        method = getattr(engine.runner, what)
        monkeypatch.setattr(engine.runner, what, lambda *a, w=what, m=method: (log.append(w), m(*a))[1])
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=4))
    finish(engine)
    # The prompt and three decode steps: the fourth token needs no step after it.
    assert log == ["submit", "submit", "collect", "submit", "collect", "submit", "collect", "collect"]


@pytest.mark.parametrize("mode", [(0, 0), *MODES], ids=str)
def test_a_block_is_filled_again_only_when_its_step_is_done(
    model: Path, mode: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device copies a block, and the results beside it, whenever it gets there."""
    engine = make(model, *mode, max_rows=16)
    pending: dict[int, int] = {}  # memory of a block -> ticket of the step that it describes
    tickets = iter(range(1000))
    submit, wait = engine.runner.submit, engine.runner.backend.wait

    def watched_submit(*arguments: object) -> object:
        block = id(engine.runner.block)
        assert block not in pending
        in_flight = submit(*arguments)
        pending[block] = in_flight.ticket
        return in_flight

    def watched_wait(ticket: int) -> None:
        wait(ticket)
        for block in [b for b, t in pending.items() if t == ticket]:
            del pending[block]

    monkeypatch.setattr(engine.runner.backend, "fence", lambda: next(tickets))
    monkeypatch.setattr(engine.runner.backend, "wait", watched_wait)
    monkeypatch.setattr(engine.runner, "submit", watched_submit)
    engine.add("a", list(range(40)), SamplingParams(max_tokens=6))
    engine.add("b", list(range(90)), SamplingParams(max_tokens=6))
    finish(engine)
    assert not pending and next(tickets) > 10


def test_who_has_a_token_gets_the_next_while_others_run(model: Path) -> None:
    """However few rows a decode step has: a request waits in the queue, and not with KV blocks in its hands."""
    engine = make(model, 0, 2)
    for name in "abcd":
        engine.add(name, [1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0))
    at: dict[str, list[int]] = {}
    for step in range(300):
        for output in engine.step() if engine.busy else []:
            at.setdefault(output.request_id, []).append(step)
    assert [len(steps) for steps in at.values()] == [12] * 4
    assert max(np.diff(steps).max() for steps in at.values()) <= 2


@pytest.mark.parametrize("again", ["a", "d"], ids=["first", "last"])
def test_who_computes_its_text_again_takes_turns_with_the_others(model: Path, again: str) -> None:
    """Whether it is before them, its RoPE turned, or behind, preempted: it does not keep them waiting, nor they it."""
    engine = make(model, 0, 4, max_seqs=4)
    for name in "abcd":
        engine.add(name, [1, 2, 3], SamplingParams(max_tokens=90, temperature=0.0))
    at: dict[str, list[int]] = {}
    for step in range(100):
        if step == 45:
            sequence = engine._sequences[again]
            sequence.restart() if again == "a" else engine.scheduler._preempt(sequence)
        for output in engine.step():
            at.setdefault(output.request_id, []).append(step)
    gaps = {name: np.diff(steps).max() for name, steps in at.items()}
    assert 10 <= gaps.pop(again) <= 25
    assert max(gaps.values()) <= 3
