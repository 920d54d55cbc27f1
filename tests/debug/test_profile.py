"""The profile of a step: what it counts, on a tiny model whose bytes and operations are known."""

from __future__ import annotations

import pytest

from atlas.debug import profile
from atlas.errors import ConfigError
from atlas.runtime import core
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint
from tests import tiny_model
from tests.models import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


def load(folder, backend: str = "cpu") -> Runner:
    options = RunnerOptions(backend=backend, quant="f32", threads=2, max_context=64, max_seqs=2, max_rows=16)
    with open_checkpoint(folder) as checkpoint:
        return Runner.load(checkpoint, options)


def test_work_is_counted_by_kind(folder) -> None:
    runner = load(folder)
    profile.fill_step(runner, seqs=2, rows=3, position=20)
    found = profile.profile(runner, repeats=2)
    kinds = {work.kind: work for work in found.work}
    linear, attention = kinds["linear gate_up"], kinds["paged_attention attention"]
    assert (linear.launches, linear.operations) == (2, 2 * (6 + 2) * 192 * 64)  # of the last layer, rows of logits
    assert linear.bytes == 4 * (2 * 192 * 64 + (6 + 2) * (64 + 192))
    assert attention.operations == 2 * 4 * 4 * 32 * 2 * (21 + 22 + 23)
    cache, q_and_out, indices = 2 * 46 * 2 * 32 * 4, 2 * 6 * 128 * 4, 4 * (6 + 6 + 2 * 4)
    assert attention.bytes == 2 * (cache + q_and_out + indices)
    assert kinds["linear lm_head"].operations == 2 * 2 * 320 * 64  # rows of logits, not of the step
    assert all(work.seconds > 0 for work in found.work) and found.step_seconds > 0
    assert (runner.block.logit_n_top[:2] == -1).all()  # the whole step, too, was one that asks for no log-probabilities


@pytest.mark.parametrize("rows", [1, 3])
def test_fused_products_are_counted(folder, rows: int) -> None:
    """A GPU's programs multiply and add as often, in fewer launches."""
    found = []
    for kind in ("cpu", "cuda"):
        runner = run.load(folder, "reference", "f32", max_seqs=2, max_rows=16, programs=kind)
        profile.fill_step(runner, 2, rows, 20)
        found.append(profile.cost(runner)[1])
    assert found[0] == found[1] > 0


def test_the_table_names_every_kind_with_its_share(folder) -> None:
    runner = load(folder)
    profile.fill_step(runner, seqs=1, rows=1, position=0)
    found = profile.profile(runner, repeats=1)
    lines = profile.table(found, {"read": 1e9, "f32": 2e9}).splitlines()
    assert len(lines) == len(found.work) + 2
    slowest = max(found.work, key=lambda work: work.seconds)
    assert lines[1].startswith(slowest.kind)
    assert "1.0 GB/s read, 2.0 GFLOP/s fp32" in lines[-1]


def test_a_step_beyond_the_limits(folder) -> None:
    with pytest.raises(ConfigError, match="3 sequences; accepted: at most 2"):
        profile.fill_step(load(folder), seqs=3, rows=1, position=0)
    with pytest.raises(ConfigError, match="5 blocks of a sequence; accepted: at most 4"):
        profile.fill_step(load(folder), seqs=1, rows=1, position=64)


def test_only_the_core_times_launches(folder) -> None:
    runner = load(folder, "reference")
    with pytest.raises(ConfigError, match="cpu or cuda: the core times single launches"):
        profile.profile(runner, repeats=1)


def test_rates_of_this_machine_are_plausible() -> None:
    rates = core.extension().cpu_rates(1)
    assert 1e8 < rates["read"] < 1e12 and 1e8 < rates["f32"] < 1e12
    if "avx512vnni" in core.extension().cpu_levels():
        assert rates["int8"] > rates["f32"]
