"""Threads, forks, several models, the end: what an LLM is as an object of a process."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.engine.engine import Engine
from atlas.errors import AtlasError
from atlas.llm import LLM, SamplingParams
from tests.llm.test_generate import idle
from tests.serve.serve_harness import environment, eventually


def make(model: Path, **options: object) -> LLM:
    return LLM(model, **{"backend": "cpu", "quant": "f32", "max_seqs": 8, "threads": 1, **options})


def resources() -> tuple[set[str], list[str]]:
    gc.collect()
    return set(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closing_leaves_no_thread_and_no_descriptor(model: Path) -> None:
    make(model).close()  # whatever a library opens once
    before = resources()
    with make(model) as llm:
        expected = llm.generate("a", SamplingParams(temperature=0))[0].outputs
        assert "atlas-engine" in {thread.name for thread in threading.enumerate()}
    assert resources() == before
    for call in (lambda: llm.generate("a"), llm.stats, lambda: llm.logits([1])):
        with pytest.raises(AtlasError, match="LLM: closed"):
            call()
    llm.close()
    dropped = make(model)
    assert dropped.generate("a", SamplingParams(temperature=0))[0].outputs == expected
    gone = weakref.ref(dropped)
    del dropped
    assert resources() == before and gone() is None


def test_close_ends_a_stream_with_an_error(model: Path) -> None:
    llm = make(model)
    stream = iter(llm.generate("a", SamplingParams(max_tokens=None, ignore_eos=True), stream=True))
    next(stream)
    llm.close()
    with pytest.raises(AtlasError, match="closed"):
        list(stream)


@pytest.mark.parametrize("call", [lambda llm, ids: llm.logits(ids), lambda llm, ids: llm.perplexity(ids)])
def test_close_does_not_wait_for_scores(model: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end after their step, and their caller is told: a part of them must not pass for the whole."""
    llm = make(model, max_rows=8)
    steps: list[None] = []
    errors: list[AtlasError] = []
    forward = llm.engine_thread.call(lambda engine: engine.runner.forward)

    def slow() -> None:
        steps.append(None)
        time.sleep(0.05)
        forward()

    llm.engine_thread.call(lambda engine: monkeypatch.setattr(engine.runner, "forward", slow))

    def score() -> None:
        with pytest.raises(AtlasError, match="closed") as caught:
            call(llm, [5] * 256)
        errors.append(caught.value)

    thread = threading.Thread(target=score)
    thread.start()
    eventually(lambda: len(steps) == 2)
    llm.close()
    assert len(steps) <= 4, "of 32"
    thread.join(5)
    assert len(errors) == 1


def test_two_models_at_once(model: Path, tmp_path: Path) -> None:
    from tests.llm.conftest import make_model

    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with make(model) as a, make(make_model(tmp_path / "m", seed=5)) as b:
        alone = [llm.generate("x", params)[0].outputs for llm in (a, b)]
        results: dict[int, list[object]] = {}
        threads = [
            threading.Thread(target=lambda i=i, m=m: results.__setitem__(i, m.generate("x", params)[0].outputs))  # type: ignore[misc]
            for i, m in enumerate((a, b) * 4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert alone[0] != alone[1] and [results[i] for i in range(8)] == alone * 4


_FORK = """
import os, sys
from atlas.llm import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
options = dict(backend="cpu", quant="f32", max_seqs=2, threads=2)
llm = LLM(sys.argv[1], **options)
expected = llm.generate("a", params)[0].outputs
stream = llm.generate("a", SamplingParams(max_tokens=None), stream=True)
next(stream)
if (child := os.fork()) == 0:
    for call in (
        lambda: llm.generate("a", params),
        llm.stats,
        lambda: llm.logits([1]),
        lambda: llm.perplexity([1, 2]),
        lambda: list(stream),  # begun by the parent
    ):
        try:
            call()
        except Exception as error:
            assert type(error).__name__ == "AtlasError" and "in its fork" in str(error), error
        else:
            raise SystemExit("the parent's LLM worked in the child")
    del stream
    llm.close()
    with LLM(sys.argv[1], **options) as own:
        assert own.generate("a", params)[0].outputs == expected
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
del stream
assert llm.generate("a", params)[0].outputs == expected
print("fine")
"""


def test_a_forked_child_is_told_and_may_make_its_own(model: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _FORK, str(model)], capture_output=True, text=True, timeout=120, env=environment()
    )
    assert (result.returncode, result.stdout) == (0, "fine\n"), result.stderr


def test_the_interpreter_ends_while_something_runs(model: Path) -> None:
    code = (
        "import sys; from atlas.llm import LLM, SamplingParams; llm = LLM(sys.argv[1], backend='cpu', quant='f32'); "
        "stream = llm.generate(['a'] * 8, SamplingParams(max_tokens=None, ignore_eos=True), stream=True); next(stream)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_an_engine_that_breaks_is_told_to_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(model) as llm:

        def broken(self: Engine) -> None:
            raise ValueError("a fault in a step")

        monkeypatch.setattr(Engine, "step", broken)
        for _ in range(2):
            with pytest.raises(AtlasError, match="a fault in a step"):
                llm.generate("a")


def test_64_streams_under_pressure(model: Path) -> None:
    """Random lengths, cancels, and a cache so small that requests are preempted: each that ends has the tokens of a run
    of its own, streams are whole, and nothing is left."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    rng = random.Random(seed)
    block = 2 * 2 * 2 * 16 * 32 * 4
    cases = [
        (
            [rng.randrange(7, 263) for _ in range(rng.randrange(1, 100))],
            SamplingParams(
                max_tokens=rng.randrange(1, 60), temperature=float(index % 2), seed=rng.randrange(100), ignore_eos=True
            ),
            rng.choice([None, None, 0, 1, 5, 20]),
        )
        for index in range(64)
    ]
    with make(model, threads=2, max_seqs=16) as roomy:
        expected = [roomy.generate([prompt], params)[0].outputs[0] for prompt, params, _ in cases]
    before = resources()
    with make(model, threads=2, max_seqs=16, max_rows=48, kv_memory=20 * block) as llm:
        got: dict[int, tuple[list[int], str]] = {}
        failures: list[BaseException] = []

        def follow(index: int) -> None:
            prompt, params, limit = cases[index]
            ids, text = [], ""
            try:
                for delta in llm.generate([prompt], params, stream=True):
                    ids += delta.token_ids
                    text += delta.text
                    if limit is not None and len(ids) > limit:
                        return
                got[index] = (ids, text)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=follow, args=(index,)) for index in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not failures
        assert llm.engine_thread.call(lambda engine: engine.scheduler.preemptions) > 0
        gc.collect()
        assert idle(llm)
        llm.engine_thread.call(lambda engine: engine.pool.check_integrity())
    assert resources() == before
    assert {index for index, case in enumerate(cases) if case[2] is None} <= set(got)
    for index, (ids, text) in got.items():
        assert (ids, text) == (expected[index].token_ids, expected[index].text), f"stream {index}"
