"""The CPU backend: results that depend on no number of threads or level, and a pool that stays out of the way."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest

from atlas.errors import DeviceError
from atlas.runtime import core
from atlas.runtime.step import HEADER_WORDS, STEP_VERSION
from tests.contract import harness
from tests.contract.conftest import cpu_device
from tests.contract.harness import Case, case
from tests.contract.inputs import normal, paged
from tests.contract.test_moe_mlp import SIZES as MOE_SIZES
from tests.contract.test_moe_mlp import inputs as moe_inputs
from tests.contract.test_moe_mlp import moe
from tests.runtime.test_core import launch

Given = dict[str, np.ndarray[Any, Any]]

HEADS = {"n_heads": 9, "n_kv_heads": 3, "head_dim": 64}
ATTENTION = {"window": 0, "scale": 0.125}
PAGED = {"rows": 37, "seqs": 4, "max_blocks": 9, "blocks": 40}
HEADER = np.array([STEP_VERSION, 1] + [0] * (HEADER_WORDS - 2), np.int32)


def some_cases(rng: np.random.Generator) -> list[tuple[Case, Given]]:
    """Every op whose work is divided among threads, with inputs."""
    cases: list[tuple[Case, Given]] = []
    for dtype in ("f32", "bf16"):
        for rows in (1, 13, 70):
            c = case("linear", {"x": dtype, "weight": dtype, "out": "f32"}, n=200, k=1100, rows=rows)
            cases.append((c, {"x": normal(c, "x", rng), "weight": normal(c, "weight", rng)}))
        # Many rows, and one row of a context that the workers divide.
        for sizes in (PAGED, {"rows": 1, "seqs": 1, "max_blocks": 61, "blocks": 61}):
            c = case("paged_attention", dtype, **HEADS, **ATTENTION, **sizes)
            cache = {name: normal(c, name, rng) for name in ("q", "k_cache", "v_cache")}
            cases.append((c, {**paged(c, rng), **cache}))
        c = case("gated_activation", {"gate_up": "f32", "out": dtype}, intermediate=100, activation=0, rows=3)
        cases.append((c, {"gate_up": normal(c, "gate_up", rng, 3.0)}))
        for rows in (1, 70):
            c = moe(dtype, MOE_SIZES[2], rows)
            cases.append((c, moe_inputs(c, rng)))
        c = case("rms_norm", dtype, hidden=100, eps=1e-5, rows=5)
        cases.append((c, {"x": normal(c, "x", rng), "weight": normal(c, "weight", rng)}))
    return cases


def outputs(threads: int, level: str, c: Case, given: Given) -> dict[str, bytes]:
    kernels = cpu_device(level).kernels
    after = harness.run(core.cpu_backend(threads, level), kernels, c, given)[1]
    return {o.name: after[o.name].tobytes() for o in c.operands if o.mode != "in"}


@pytest.mark.parametrize("level", core.extension().cpu_levels())
def test_results_do_not_depend_on_the_number_of_threads(level: str) -> None:
    for c, given in some_cases(np.random.default_rng()):
        expected = outputs(1, level, c, given)
        for threads in (2, 3, 8):
            assert outputs(threads, level, c, given) == expected, f"{c.op} {c} on {threads} threads"


def test_levels_with_fused_multiply_add_agree() -> None:
    """Bit for bit: every level adds up in the same order."""
    if not {"avx512", "avx2"} <= set(core.extension().cpu_levels()):
        pytest.skip("needs a CPU with avx512 and avx2")
    for c, given in some_cases(np.random.default_rng()):
        assert outputs(2, "avx512", c, given) == outputs(2, "avx2", c, given), f"{c.op} {c}"


@pytest.mark.parametrize("level", core.extension().cpu_levels())
def test_exp_at_its_limits(level: str) -> None:
    """Through gated_activation with up = 1: gate / (1 + exp(-gate))."""
    special = [0.0, -0.0, 1e-45, -1e-45, 88.7, 88.73, -88.7, -88.73, -104.0, 1e30, -1e30, np.inf, np.nan]
    gate = np.concatenate([np.array(special), np.linspace(-110, 110, 4083)]).astype(np.float32)
    c = case("gated_activation", "f32", intermediate=len(gate), activation=0, rows=1)
    given = {"gate_up": np.concatenate([gate, np.ones_like(gate)])[None]}
    actual = harness.run(core.cpu_backend(1, level), cpu_device(level).kernels, c, given)[1]["out"][0]
    with np.errstate(over="ignore", invalid="ignore"):
        wide = gate.astype(np.float64)
        denominator = 1.0 + np.exp(-wide).astype(np.float32).astype(np.float64)
        expected = wide / denominator
    np.testing.assert_allclose(actual, expected, rtol=6e-7, atol=1.5e-45)  # the smallest fp32


def test_a_token_that_could_not_be_sampled_gives_a_row_of_nan() -> None:
    """The row's own sampling then reports it; memory before the table is not read."""
    c = case("embedding", "f32", vocab=50, hidden=20, scale=1.0, rows=3, seqs=2, slots=2)
    given = {
        "row_token": np.array([-1, 7, -1], np.int32),
        "row_seq": np.array([0, 0, 1], np.int32),
        "seq_slot": np.array([1, 0], np.int32),
        "last_token": np.array([3, -1], np.int32),
        "table": np.arange(1000, dtype=np.float32).reshape(50, 20),
    }
    device = cpu_device(core.extension().cpu_levels()[0])
    out = device.run(c, given)["out"][:3]
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1:], given["table"][[7, 3]])


def adds(threads: int, launches: int) -> tuple[core.CoreBackend, int]:
    """A backend with a program that adds 1 to each of 4 numbers at offset 256, `launches` times."""
    backend = core.cpu_backend(threads)
    backend.allocate(4096)
    backend.write(0, np.ones(4, np.float32))
    handle = backend._core.load([launch()] * launches)
    backend.begin_step(1024, memoryview(HEADER), 64)
    return backend, handle


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_launches_follow_each_other(threads: int) -> None:
    """8 threads are more than the cores here: the barrier must yield, not spin."""
    backend, handle = adds(threads, 200)
    for _ in range(5):
        backend.run(handle, 0, 150)
        backend.run(handle, 150, 200)
    total = np.empty(4, np.float32)
    backend.read(256, total)
    assert total.tolist() == [1000.0] * 4


def test_memory_nodes_are_those_of_the_cpus_in_use(tmp_path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    lists = {0: f"{cpus[0]}", 1: "4000-4003", 2: f"5000,{cpus[0]}-{cpus[-1]}", 3: ""}
    (tmp_path / "online").write_text("0-3,7\n")  # 7 has no folder
    for node, text in lists.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{text}\n")
    nodes = core.extension().memory_nodes
    assert nodes(str(tmp_path)) == [0, 2]
    assert nodes(str(tmp_path / "absent")) == []
    (tmp_path / "online").write_text("nonsense")
    assert nodes(str(tmp_path)) == []
    assert len(nodes()) >= 1


def test_more_workers_than_a_quota_of_cores() -> None:
    """They must offer their core at once, and still finish."""
    backend = core.extension().cpu_backend(4, "", 1)
    assert backend.describe().endswith("4 threads")
    backend, handle = adds(4, 50)
    backend.run(handle, 0, 50)


def test_idle_threads_sleep() -> None:
    backend, handle = adds(4, 1)
    backend.run(handle, 0, 1)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.05
    backend.run(handle, 0, 1)


def test_a_forked_child_can_drop_the_backend_and_make_its_own() -> None:
    backend, handle = adds(2, 3)
    backend.run(handle, 0, 3)
    child = os.fork()
    if child == 0:
        del backend
        own, handle = adds(2, 3)
        own.run(handle, 0, 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, ""), "cpu threads: 0"), ((2, "avx1024"), "avx1024 is not usable here; accepted: .*portable")],
)
def test_wrong_arguments(arguments: tuple[int, str], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        core.extension().cpu_backend(*arguments)
