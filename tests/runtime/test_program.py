"""Programs, the step block and the memory plan."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.build.manifest import KernelEntry, KernelVariant
from atlas.errors import BuildError
from atlas.models import family_of
from atlas.runtime import memory_plan, step
from atlas.runtime.program import Recorder, StepPrograms
from atlas.runtime.step import FIELDS, SYMBOLS, Limits, StepBlock
from atlas.targets.quant import RECIPES
from atlas.targets.shape import Shard

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
LIMITS = Limits(n_rows=40, n_seqs=4, n_logits=4, max_blocks=6, n_blocks=20, n_slots=4)


def smollm2(quant: str = "bf16") -> StepPrograms:
    facts = json.loads((KERNELS / "models" / "smollm2-135m.json").read_text())
    family = family_of(facts)
    return family.record(family.configure(facts, Shard()), RECIPES[quant])


@pytest.mark.parametrize("quant", sorted(RECIPES))
def test_every_launch_reads_what_is_given_or_was_written(quant: str) -> None:
    """Weights, state, step fields and deliveries are given; workspace must be written before it is read."""
    programs = smollm2(quant)
    written = {name for name, buffer in programs.buffers.items() if buffer.kind != "workspace"}
    for launch in programs.launches():
        assert not set(launch.reads()) - written, launch.name
        written |= set(launch.writes())


def test_the_closure_is_small_and_has_no_duplicates() -> None:
    names = [key.name() for key in smollm2().closure()]
    assert len(names) == len(set(names)) == 15


def test_weights_of_a_program_are_the_weights_of_the_family() -> None:
    facts = json.loads((KERNELS / "models" / "smollm2-135m.json").read_text())
    family = family_of(facts)
    config = family.configure(facts, Shard())
    buffers = family.record(config, RECIPES["bf16"]).buffers.values()
    assert {b.name for b in buffers if b.kind == "weight"} == set(family.weights(config, ()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operands": {"x": "x", "out": "out"}}, r"operands .*accepted: exactly .*, and optionally \['bias'\]"),
        ({"operands": {"x": "x", "weight": "weight", "bias": "weight", "out": "out"}}, "buffer weight has shape"),
        ({"operands": {"x": "x", "weight": "nothing", "out": "out"}}, "no buffer 'nothing'"),
        ({"operands": {"x": "ids", "weight": "weight", "out": "out"}}, "operand x is i32"),
        ({"operands": {"x": "out", "weight": "weight", "out": "out"}}, "buffer out has shape"),
        ({"dims": {"rows": "n_cows"}}, "dim rows is bound to 'n_cows'"),
        ({"constants": {"n": 8}}, "constants .*accepted: exactly"),
        ({"constants": {"n": 9, "k": 4}}, "buffer weight has shape"),
        ({"phase": "verify"}, "phase 'verify'; accepted: prefill, decode, or '' for every step"),
    ],
)
def test_a_launch_that_breaks_its_contract_is_refused(change: dict[str, Any], message: str) -> None:
    recorder = Recorder()
    recorder.begin("forward")
    recorder.buffer("x", "f32", ("n_rows", 4), "workspace")
    recorder.buffer("ids", "i32", ("n_rows", 4), "workspace")
    recorder.buffer("weight", "f32", (8, 4), "weight")
    recorder.buffer("out", "f32", ("n_rows", 8), "workspace")
    good = {
        "operands": {"x": "x", "weight": "weight", "out": "out"},
        "dims": {"rows": "n_rows"},
        "constants": {"n": 8, "k": 4},
    }
    recorder.launch("linear", "good", **good)
    with pytest.raises(BuildError, match=message):
        recorder.launch("linear", "bad", **{**good, **change})


def test_an_optional_operand_stands_in_the_signature_only_where_it_is_given() -> None:
    recorder = Recorder()
    recorder.begin("forward")
    recorder.buffer("x", "f32", ("n_rows", 4), "workspace")
    recorder.buffer("weight", "f32", (8, 4), "weight")
    recorder.buffer("bias", "f32", (8,), "weight")
    recorder.buffer("out", "f32", ("n_rows", 8), "workspace")
    dims, constants = {"rows": "n_rows"}, {"n": 8, "k": 4}
    for bias in ({}, {"bias": "bias"}):
        recorder.launch("linear", "l", {"x": "x", "weight": "weight", **bias, "out": "out"}, dims, constants)
    recorder.begin("sample")
    without, with_bias = recorder.finish().forward.launches
    assert without.key.signature() == "linear.x_f32.weight_f32.out_f32"
    assert with_bias.key.signature() == "linear.x_f32.weight_f32.bias_f32.out_f32"
    assert without.reads() == ["x", "weight"] and with_bias.reads() == ["x", "weight", "bias"]


def test_the_closure_says_for_which_phases_kernels_are_needed() -> None:
    """Of launches of one phase, of all, and over logits, where decode kernels serve every step."""
    recorder = Recorder()
    recorder.begin("forward")
    for name, dim in (("x", "n_rows"), ("y", "n_rows"), ("logits", "n_logits")):
        recorder.buffer(name, "f32", (dim, 4), "workspace")
    for hidden, rows, phase in ((4, "n_rows", "decode"), (4, "n_logits", "prefill"), (4, "n_logits", "")):
        x = "logits" if rows == "n_logits" else "x"
        constants = {"hidden": hidden, "scale": 1.0 if rows == "n_rows" else 2.0}
        recorder.launch("residual_add", f"{rows} {phase}", {"x": x, "residual": x}, {"rows": rows}, constants, phase)
    recorder.launch(
        "residual_add", "more", {"x": "x", "residual": "y"}, {"rows": "n_rows"}, {"hidden": 4, "scale": 3.0}, "prefill"
    )
    recorder.launch("residual_add", "all", {"x": "x", "residual": "y"}, {"rows": "n_rows"}, {"hidden": 4, "scale": 3.0})
    recorder.begin("sample")
    programs = recorder.finish()
    needed = {dict(key.constants)["scale"]: phases for key, phases in programs.closure().items()}
    assert needed == {1.0: ("decode",), 2.0: ("decode",), 3.0: ("prefill", "decode")}
    made = [[launch.is_made(phase) for launch in programs.launches()] for phase in (0, 1)]
    assert made == [[False, True, True, True, True], [True, False, True, False, True]]
    lines = programs.describe().splitlines()
    assert lines[1].endswith("residual=x), in decode steps") and lines[5].endswith("residual=y)")


def test_a_buffer_declared_twice_must_agree() -> None:
    recorder = Recorder()
    recorder.buffer("x", "f32", ("n_rows", 4), "workspace")
    assert recorder.buffer("x", "f32", ("n_rows", 4), "workspace") == "x"
    with pytest.raises(BuildError, match="buffer x: declared as"):
        recorder.buffer("x", "bf16", ("n_rows", 4), "workspace")


def test_buffers_that_live_together_do_not_overlap_and_every_byte_has_an_owner() -> None:
    programs = smollm2()
    plan = memory_plan.plan(programs, LIMITS, {})
    assert sum(size for _, size in plan.ledger()) == plan.total
    owners = dict(plan.owners(programs.buffers))
    assert sum(owners.values()) == plan.total and min(owners.values()) > 0
    weights = sum(plan.sizes[b.name] for b in programs.buffers.values() if b.kind == "weight")
    assert sum(size for owner, size in owners.items() if owner.startswith("weights ")) == weights
    assert owners["k_cache"] == owners["v_cache"]
    permanent = [b for b in programs.buffers.values() if b.kind not in ("workspace", "step")]
    spans = sorted((plan.offsets[b.name], plan.offsets[b.name] + plan.sizes[b.name]) for b in permanent)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    alive: dict[str, tuple[int, int]] = {}
    for index, launch in enumerate(programs.launches()):
        for name in {*launch.reads(), *launch.writes()}:
            if programs.buffers[name].kind == "workspace":
                alive[name] = (alive.get(name, (index, index))[0], index)
    begin, end = plan.regions["workspace"]
    for a in alive:
        assert begin <= plan.offsets[a] and plan.offsets[a] + plan.sizes[a] <= end
        for b in alive:
            together = alive[a][0] <= alive[b][1] and alive[b][0] <= alive[a][1]
            if a < b and together:
                apart = (
                    plan.offsets[a] + plan.sizes[a] <= plan.offsets[b]
                    or plan.offsets[b] + plan.sizes[b] <= plan.offsets[a]
                )
                assert apart, f"{a} and {b} share memory while both are alive"
    assert end - begin < sum(plan.sizes[name] for name in alive), "no memory is reused"


def test_step_fields_do_not_overlap_and_the_header_holds_the_symbols() -> None:
    offsets, size = step.offsets(LIMITS)
    block = StepBlock(bytearray(size), LIMITS)
    for number, field in enumerate(FIELDS[1:], 1):
        block.fields[field.name][...] = number
    for number, field in enumerate(FIELDS[1:], 1):
        assert (block.fields[field.name] == number).all(), field.name
        assert offsets[field.name] % 64 == 0
    block.set_symbols({"n_rows": 7, "n_seqs": 2, "n_logits": 1})
    assert block.header[0] == step.STEP_VERSION
    assert block.header[1 : 1 + len(SYMBOLS)].tolist() == [7, 2, 1, 6, 20, 4]
    assert block.used_bytes() == offsets["block_table"] + 2 * 6 * 4


@pytest.mark.parametrize("value", [41, -1])
def test_a_symbol_beyond_its_limit_is_refused(value: int) -> None:
    block = StepBlock(bytearray(step.offsets(LIMITS)[1]), LIMITS)
    with pytest.raises(ValueError, match=r"step symbol n_rows is -?\d+, accepted: 0\.\.40"):
        block.set_symbols({"n_rows": value})


def test_field_dtypes_are_what_kernels_read() -> None:
    block = StepBlock(bytearray(step.offsets(LIMITS)[1]), LIMITS)
    expected = {"i32": np.int32, "f32": np.float32, "i64": np.int64}
    assert all(block.fields[field.name].dtype == expected[field.dtype] for field in FIELDS)


def test_scratch_has_a_place_of_its_own() -> None:
    """One for all launches of a kernel, beside everything else."""
    programs = smollm2()
    kernels = declared(programs)
    for size, (name, entry) in zip((1000, 5000), list(kernels.items())[:2], strict=True):
        variants = tuple(KernelVariant(symbol=f"{name}_{v}", scratch=size + v) for v in range(2))
        kernels[name] = dataclasses.replace(entry, variants=variants)
    scratch = memory_plan.scratch_of(programs, kernels)
    assert sorted(scratch.values()) == [1000, 1001, 5000, 5001]
    plan = memory_plan.plan(programs, LIMITS, {}, scratch)
    begin, end = plan.regions["scratch"]
    taken = sorted((plan.offsets[f"scratch.{symbol}"], size) for symbol, size in scratch.items())
    for (offset, size), (after, _) in itertools.pairwise([*taken, (end, 0)]):
        assert begin <= offset and offset % 256 == 0 and offset + size <= after
    assert sum(size for _, size in plan.ledger()) == plan.total


def test_products_share_a_place_in_scratch() -> None:
    """All bounds of rows of all of them; a kernel of another op has its own."""
    programs = smollm2()
    kernels = declared(programs)
    sizes = itertools.count(1000)
    for name, entry in kernels.items():
        if entry.op in ("linear", "gated_linear", "sample"):
            variants = tuple(KernelVariant(symbol=f"{name}_{v}", scratch=next(sizes)) for v in range(2))
            kernels[name] = dataclasses.replace(entry, variants=variants)
    scratch, shared = memory_plan.scratch_of(programs, kernels), memory_plan.shares(programs, kernels)
    plan = memory_plan.plan(programs, LIMITS, {}, scratch, shared=shared)
    begin, end = plan.regions["scratch"]
    assert {plan.offsets[f"scratch.{symbol}"] for symbol in shared} == {begin}
    after = begin + max(scratch[symbol] for symbol in shared)
    others = sorted((plan.offsets[f"scratch.{symbol}"], scratch[symbol]) for symbol in scratch.keys() - shared)
    assert len(shared) >= 2 * 2 and len(others) == 2
    for (offset, size), (following, _) in itertools.pairwise([*others, (end, 0)]):
        assert after <= offset and offset + size <= following


def declared(programs: StepPrograms, **layouts: str) -> dict[str, KernelEntry]:
    """Entries of all kernels of a program; `linear_weight="tiles"` for operand weight of op linear."""
    return {
        key.name(): KernelEntry(
            key.name(),
            key.op,
            key.op,
            {o: layouts[f"{key.op}_{o}"] for o, _ in key.dtypes if f"{key.op}_{o}" in layouts},
        )
        for key in programs.closure()
    }


def test_a_buffer_has_the_layout_that_its_kernels_declare() -> None:
    programs = smollm2()
    operands = ("rms_norm_out", "linear_x", "gated_activation_out", "paged_attention_out")
    layouts = memory_plan.buffer_layouts(programs, declared(programs, **dict.fromkeys(operands, "tiles")))
    assert {name for name, layout in layouts.items() if layout == "tiles"} == {
        "normed",
        "gated",
        "attended",
        "logits_normed",
        "logits_gated",
    }


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (
            {"rms_norm_out": "tiles"},
            r"workspace normed: kernel rms_norm.* of launch layers.0.attention_norm has layout tiles, "
            r"kernel linear.* of launch layers.0.qkv has row_major; accepted: one layout in all kernels",
        ),
        (
            {"rope_kv_append_k_cache": "kv_tiles"},
            "state layers.0.k_cache: kernel rope.* has layout kv_tiles, kernel paged_attention.* has row_major",
        ),
        ({"gather_rows_index": "tiles"}, r"step step.logit_row: the host has layout row_major, kernel gather_rows"),
    ],
)
def test_kernels_that_disagree_about_a_buffer_are_named(layouts: dict[str, str], message: str) -> None:
    programs = smollm2()
    with pytest.raises(BuildError, match=message):
        memory_plan.buffer_layouts(programs, declared(programs, **layouts))
