"""Embeddings: the rows that the head reads, pooled over a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.engine.engine import Engine
from atlas.engine.sampling import SamplingParams
from atlas.errors import RequestError
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint
from tests import tiny_model
from tests.models import run
from tests.models.test_smollm2 import ORACLE, relative_l2
from tests.oracle.prompts import COLUMNS

MEAN = SamplingParams(max_tokens=0, pooling="mean", prompt_logprobs=0)
LAST = SamplingParams(max_tokens=0, pooling="last")

BLOCK_BYTES = 2 * 2 * 2 * 16 * 32 * 4
"""Of 16 tokens of the tiny model."""

Array = np.ndarray[Any, Any]


def embed(engine: Engine, jobs: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Array]:
    """Add all at once and step until idle."""
    for name, (prompt, sampling) in jobs.items():
        engine.add(name, prompt, sampling)
    found = {}
    while engine.busy:
        for output in engine.step():
            if output.embedding is not None:
                assert output.finish_reason == "length" and not output.token_ids and not output.prompt_logprobs
                found[output.request_id] = np.frombuffer(output.embedding, "<f4")
    assert engine.pool.free == engine.pool.total
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


def make(model: Path, **options: Any) -> Engine:
    with open_checkpoint(model) as checkpoint:
        options = {"backend": "reference", "quant": "f32", "max_seqs": 8, "max_rows": 64, **options}
        return Engine(Runner.load(checkpoint, RunnerOptions(**options)))


@pytest.mark.parametrize("name", ["sentence", "chat"])
def test_they_are_what_the_logits_are_made_of(smollm2_path: Path, name: str) -> None:
    """SmolLM2 ties its head, so an embedding times the head's rows is the logits that transformers has there; and what
    is linear holds for the mean too."""
    engine = Engine(run.load(smollm2_path, "cpu", "f32", max_context=1024))
    head = engine.runner.read("embedding.weight")
    with np.load(ORACLE) as oracle:
        ids = oracle[f"{name}.ids"].tolist()[:1023]
        columns = np.linspace(0, len(head) - 1, COLUMNS).astype(np.int64)
        found = embed(engine, {"mean": (ids, MEAN), "last": (ids, LAST)})
        assert relative_l2(head @ found["last"], oracle[f"{name}.last"]) < 2e-3
        assert relative_l2(head[columns] @ found["mean"], oracle[f"{name}.columns"][: len(ids)].mean(axis=0)) < 2e-3


def test_the_mean_is_that_of_every_beginning(model: Path) -> None:
    """The row of a token depends on nothing after it."""
    prompt = np.random.default_rng(1).integers(0, 320, 23).tolist()
    engine = make(model)
    beginnings = {str(n): (prompt[:n], LAST) for n in range(1, 24)}
    found = embed(engine, {"mean": (prompt, MEAN), **beginnings})
    assert np.allclose(found["mean"], np.mean([found[name] for name in beginnings], axis=0), rtol=1e-5, atol=1e-6)
    assert len({vector.tobytes() for vector in found.values()}) == 24


@pytest.mark.parametrize("options", [{}, {"max_rows": 11}, {"kv_memory_bytes": 8 * BLOCK_BYTES}])
def test_whatever_else_runs(model: Path, options: dict[str, Any]) -> None:
    """In chunks, among generating sequences, with some taken off the device and computed again."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 320, n).tolist() for n in (1, 5, 16, 17, 40, 41)]
    jobs = {f"{kind.pooling}{i}": (prompt, kind) for i, prompt in enumerate(prompts) for kind in (MEAN, LAST)}
    alone = {name: embed(make(model), {name: job})[name] for name, job in list(jobs.items())[-4:]}
    engine = make(model, **options)
    others = {f"other{i}": (prompt, SamplingParams(max_tokens=12)) for i, prompt in enumerate(prompts)}
    found = embed(engine, {**others, **jobs})
    assert found.keys() == jobs.keys()
    assert (engine.scheduler.preemptions > 0) == ("kv_memory_bytes" in options)
    for name, vector in alone.items():
        assert np.allclose(found[name], vector, rtol=1e-5, atol=1e-6), name


def test_one_that_is_taken_off_in_the_middle(model: Path) -> None:
    """Others grow into its blocks while half of its prompt is computed: no row counts twice."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 320, 41).tolist()
    alone = embed(make(model), {"mean": (prompt, MEAN)})["mean"]
    engine = make(model, max_rows=11, kv_memory_bytes=8 * BLOCK_BYTES)
    for i in range(3):
        engine.add(f"other{i}", rng.integers(0, 320, 10).tolist(), SamplingParams(max_tokens=40))
    while any(len(sequence.tokens) < 14 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    engine.add("mean", prompt, MEAN)
    pooled = engine.scheduler.waiting[0]
    while not engine.scheduler.preemptions:
        engine.step()
    assert 1 < pooled.prompt_reported < 41 and pooled.computed == 0
    assert np.allclose(embed(engine, {})["mean"], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=1, pooling="last"),
        SamplingParams(max_tokens=0, pooling="mean"),
        SamplingParams(max_tokens=0, pooling="mean", prompt_logprobs=3),
    ],
)
def test_what_makes_no_sense(model: Path, sampling: SamplingParams) -> None:
    with pytest.raises(RequestError, match="pooling"):
        make(model).add("a", [1, 2], sampling)
