"""How many rows kernels' variants allow, and which graphs are recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from atlas.build.manifest import KernelEntry, KernelVariant
from atlas.runtime import variants
from tests import tiny_model
from tests.runtime.fake_cuda import kernel_pack, run
from tests.runtime.test_program import smollm2


def kernels(**bounds: list[tuple[int, int]]) -> dict[str, KernelEntry]:
    """Entries of all kernels of a program: (phase, bound) of the variants by op; others serve anything."""
    return {
        key.name(): KernelEntry(
            key.name(),
            key.op,
            "",
            {},
            variants=tuple(KernelVariant(phase=phase, max_rows=rows) for phase, rows in bounds.get(key.op, [(0, 0)])),
        )
        for key in smollm2().closure()
    }


@pytest.mark.parametrize(
    ("bounds", "rows", "logits"),
    [
        ({}, 256, 1 << 30),
        ({"rope_kv_append": [(1, 0), (2, 8), (2, 64)]}, 64, 1 << 30),
        ({"rope_kv_append": [(1, 64), (2, 8), (2, 0)]}, 256, 1 << 30),
        ({"linear": [(1, 0), (2, 8), (2, 128)], "sample": [(0, 100)]}, 128, 100),
    ],
)
def test_most_rows(bounds: dict[str, list[tuple[int, int]]], rows: int, logits: int) -> None:
    """A prompt's variants do not count; a linear serves layers and head."""
    launches = smollm2().launches()
    assert variants.most_rows(launches, kernels(**bounds), "n_rows") == rows
    assert variants.most_rows(launches, kernels(**bounds), "n_logits") == logits


def test_launches_of_prompts_alone_bound_no_decode_step() -> None:
    launches = [
        dataclasses.replace(launch, phase="prefill" if launch.key.op == "paged_attention" else "")
        for launch in smollm2().launches()
    ]
    bounds = {"paged_attention": [(0, 16)], "rope_kv_append": [(0, 64)]}
    assert variants.most_rows(launches, kernels(**bounds), "n_rows") == 64


@pytest.mark.parametrize("rows", [1, 3, 8, 100, 256])
def test_every_step_has_a_graph_that_is_not_much_larger(rows: int) -> None:
    buckets = variants.buckets(rows)
    assert buckets == sorted(set(buckets)) and buckets[-1] == rows
    for count in range(1, rows + 1):
        bucket = next(size for size in buckets if size >= count)
        assert bucket <= max(8, count * 1.5) and (count > 4 or bucket <= 4)


def test_nothing_is_recorded_where_no_kernel_is_for_decoding() -> None:
    assert variants.buckets(0) == []


MODEL = """
from pathlib import Path
import numpy as np
from atlas.runtime import step
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint

options = RunnerOptions(backend="cuda", quant="bf16", kernel_packs=(sys.argv_pack,), kv_memory_bytes=1 << 20)
with open_checkpoint(Path(sys.argv_model)) as checkpoint:
    runner = Runner.load(checkpoint, options)
print([stage for stage, _ in runner.ledger], runner.decode_rows, runner.limits.n_rows, runner.limits.n_seqs)
calls = Path(os.environ["FAKE_CUDA_CALLS"])
before = len(calls.read_text().splitlines())

def play(phase, rows, masks=()):
    block = runner.block
    block.set_symbols({"n_rows": rows, "n_seqs": rows, "n_logits": rows})
    block.set_phase(phase)
    global before
    runner.collect(runner.submit(masks))
    made = calls.read_text().splitlines()[before:]
    before += len(made)
    return made.count("cuGraphLaunch"), made.count("cuLaunchKernelEx") > 0, made.count("cuMemAlloc_v2")

mask = np.zeros(10, np.uint32)
print(play(step.PHASE_DECODE, 3), play(step.PHASE_DECODE, 40), end=" ")
print(play(step.PHASE_PREFILL, 3), play(step.PHASE_DECODE, 1, [mask]))
"""


def test_decode_steps_are_replayed_and_others_launched(fake_driver: Path, tmp_path: Path) -> None:
    """A GPU's default sizes; one graph a decode step, two where a mask comes between; prompts are launched."""
    model = tiny_model.write(tmp_path / "model")
    pack = kernel_pack(model, tmp_path / "kernels.atlaspack")
    code = f"import sys\nsys.argv_pack, sys.argv_model = {str(pack)!r}, {str(model)!r}\n"
    status, output = run(fake_driver, code + MODEL, FAKE_CUDA_CALLS=str(tmp_path / "calls"))
    assert status == 0, output
    first, second = output.splitlines()[-2:]
    stages = ["configure", "memory", "weights", "programs", "graphs", "warm up"]
    assert first == f"{stages} 256 8192 256"
    assert second == "(1, False, 0) (1, False, 0) (0, True, 0) (2, False, 0)"


ONE_PHASE = """
from pathlib import Path
from atlas.runtime import step
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint

options = RunnerOptions(backend="cuda", quant="bf16", kernel_packs=(sys.argv_pack,), kv_memory_bytes=1 << 20)
with open_checkpoint(Path(sys.argv_model)) as checkpoint:
    runner = Runner.load(checkpoint, options)
ops = {variant.symbol: entry.op for entry in runner._bound.kernels.values() for variant in entry.variants}
log = Path(os.environ["FAKE_CUDA_LOG"])
for phase, rows in ((step.PHASE_PREFILL, 3), (step.PHASE_DECODE, 3), (step.PHASE_DECODE, 200)):
    before = len(log.read_text().splitlines())
    runner.block.set_symbols({"n_rows": rows, "n_seqs": rows, "n_logits": rows})
    runner.block.set_phase(phase)
    runner.collect(runner.submit())
    made = [ops.get(line.split()[0]) for line in log.read_text().splitlines()[before:]]
    named = ("rope_kv_append", "paged_attention", "rope_attention", "linear", "normed_linear", "normed_logits")
    print(*(made.count(op) for op in named))
"""


def test_a_step_makes_the_launches_of_its_phase(fake_driver: Path, tmp_path: Path) -> None:
    """Prompts launch by launch, decode steps from graphs of a few sizes. The model has two layers, each with three
    products that are not gated, and a head. Where norms are part of products, the last layer's MLP and the head run
    decode kernels in every step, and a decode step has no plain product."""
    model = tiny_model.write(tmp_path / "model")
    pack = kernel_pack(model, tmp_path / "kernels.atlaspack", every=True)
    code = f"import sys\nsys.argv_pack, sys.argv_model = {str(pack)!r}, {str(model)!r}\n"
    status, output = run(fake_driver, code + ONE_PHASE, FAKE_CUDA_LOG=str(tmp_path / "log"))
    assert status == 0, output
    assert output.splitlines()[-3:] == ["2 2 0 5 0 1", "0 0 2 0 2 1", "0 0 2 0 2 1"]
