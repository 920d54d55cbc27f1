"""What a step costs the host: it must be done before the device is, which needs 2 ms for 128 rows of a small model.
On the reference backend with its arithmetic left out, so that all that is counted is the engine's."""

from __future__ import annotations

import gc
import statistics
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint
from tests import tiny_model

SEQUENCES, TOKENS = 128, 100


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    options = RunnerOptions(backend="reference", quant="f32", max_seqs=SEQUENCES, max_rows=1024)
    with open_checkpoint(tiny_model.write(tmp_path)) as checkpoint:
        runner = Runner.load(checkpoint, options)
    runner.work_ahead(1)
    runner.decode_rows = SEQUENCES
    monkeypatch.setattr(runner.backend, "run", lambda *arguments: None)
    engine = Engine(runner)
    rng = np.random.default_rng()
    for i in range(SEQUENCES):
        engine.add(str(i), rng.integers(0, 320, 16).tolist(), SamplingParams(max_tokens=TOKENS, temperature=0.0))
    return engine


def test_calls_of_a_step(engine: Engine) -> None:
    """Function calls stand for time, which other work on the machine would blur: 30 for a sequence take 0.6 ms of one
    core of a small server for 128 of them; 75 took 1.6 ms. A step that gives all of them a block costs little more."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    costs = []
    while engine.busy:
        calls = 0
        sys.setprofile(count)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        costs.append(calls)
    decoding = costs[4:-4]
    assert len(decoding) > 80, "each step decodes all sequences"
    assert statistics.median(decoding) < 40 * SEQUENCES
    assert max(decoding) < 1.5 * statistics.median(decoding)


def test_steps_leave_nothing_to_the_cycle_collector(engine: Engine) -> None:
    """A full collection takes 17 ms in a bare process, and 50 ms where PyTorch is imported."""
    gc.collect()
    before, steps = [generation["collections"] for generation in gc.get_stats()], 0
    while engine.busy:
        engine.step()
        steps += 1
    ran = [generation["collections"] - b for generation, b in zip(gc.get_stats(), before, strict=True)]
    assert steps > 80 and ran[0] < steps / 4 and ran[-1] == 0
