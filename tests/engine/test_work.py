"""What the engine says of its work: times of a request, sums over steps."""

from __future__ import annotations

import time

import numpy as np
import pytest

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams, SequenceOutput, StepOutput, Timing, decode_from_engine, encode
from atlas.engine.work import SIZES, WorkCount
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint
from tests import tiny_model


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    options = RunnerOptions(backend="reference", quant="f32", max_seqs=4, max_rows=16)
    with open_checkpoint(tiny_model.write(tmp_path_factory.mktemp("tiny"))) as checkpoint:
        return Runner.load(checkpoint, options)


def run(engine: Engine) -> list[SequenceOutput]:
    outputs = []
    while engine.busy:
        outputs += engine.step()
    return outputs


def prompt(length: int) -> list[int]:
    return np.random.default_rng().integers(0, 320, length).tolist()


def test_steps_are_counted_by_size(runner: Runner) -> None:
    engine = Engine(runner)
    engine.add("a", prompt(40), SamplingParams(max_tokens=3))  # steps of 16, 16 and 8 rows, then two of one
    run(engine)
    work = engine.stats().work
    assert (engine.steps, work.rows, work.sequences) == (5, 42, 5)
    assert work.steps_by_rows == [2, 0, 0, 1, 2] + [0] * (SIZES - 5)
    assert work.steps_by_sequences == [5] + [0] * (SIZES - 1)


@pytest.mark.parametrize(
    ("size", "entry"),
    [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (65536, 16), (65537, 17), (10**6, 17)],
)
def test_entry_i_holds_sizes_up_to_two_to_the_i(size: int, entry: int) -> None:
    count = WorkCount()
    count.submitted(size, size, 0.0)
    work = count.so_far()
    assert work.steps_by_rows.index(1) == work.steps_by_sequences.index(1) == entry


def test_the_loop_s_time_is_split(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(runner)
    collect, submit = runner.collect, runner.submit

    def slow_collect(*arguments: object) -> object:
        time.sleep(0.02)
        return collect(*arguments)  # type: ignore[arg-type]

    def slow_submit(*arguments: object) -> object:
        time.sleep(0.01)
        return submit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "collect", slow_collect)
    monkeypatch.setattr(runner, "submit", slow_submit)
    engine.add("a", prompt(3), SamplingParams(max_tokens=5))
    began = time.perf_counter()
    run(engine)
    seconds, work = time.perf_counter() - began, engine.stats().work
    assert work.wait >= 5 * 0.02 and work.submit >= 5 * 0.01
    assert work.schedule > 0 and work.output > 0
    assert work.schedule + work.submit + work.wait + work.output == pytest.approx(seconds, rel=0.05)


def test_the_first_token_says_where_the_time_went(runner: Runner) -> None:
    engine = Engine(runner)
    engine.add("a", prompt(3), SamplingParams(max_tokens=4))
    engine.add("none", prompt(3), SamplingParams(max_tokens=0))
    time.sleep(0.05)
    outputs = run(engine)
    for request in ("a", "none"):
        timings = [output.timing for output in outputs if output.request_id == request]
        assert timings[0] is not None and timings[1:] == [None] * (len(timings) - 1)
        assert 0.05 <= timings[0].queued < 0.5 and 0 < timings[0].prefill < 5


def test_a_request_waits_until_it_has_a_place(runner: Runner) -> None:
    engine = Engine(runner)
    for i in range(5):  # one more than run at once
        engine.add(str(i), prompt(2), SamplingParams(max_tokens=6))
    timings = {o.request_id: o.timing for o in run(engine) if o.timing is not None}
    assert len(timings) == 5
    assert timings["4"].queued > timings["0"].queued + timings["0"].prefill


def test_outputs_on_the_wire_name_what_they_have() -> None:
    """A token's output is small: at 128 requests and 5 ms a step these are all that the processes exchange."""
    whole = SequenceOutput("r1", [7], timing=Timing(0.5, 1.0))
    assert decode_from_engine(encode(StepOutput([whole]))[4:]) == StepOutput([whole])
    assert len(encode(StepOutput([SequenceOutput("r1000", [1000])] * 128))) < 128 * 40
    assert SequenceOutput.join([whole, SequenceOutput("r1", [8])]).timing == Timing(0.5, 1.0)
