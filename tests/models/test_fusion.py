"""Fused programs compute what the model's own do, for every family; and what must not be fused is not."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.models import family_of, fusion
from atlas.models.fusion import fused
from atlas.runtime.program import Recorder, StepPrograms
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from tests import family_models
from tests.models import run

NAMES = ("llama-biases", "llama-gelu", "qwen3-biases", "moe-dense-layer", "gemma3", "phi3-window", "granite-biases")
"""One of each family and of what its launches may have: biases, a norm after a block, a residual scale, experts."""


def programs(name: str, quant: str, kind: str) -> StepPrograms:
    config = family_models.config(name)
    family = family_of(config)
    return fusion.record(family, family.configure(config, Shard()), recipe(quant, "cuda"), kind)


def ops(found: StepPrograms) -> collections.Counter[str]:
    return collections.Counter(launch.key.op for launch in found.launches())


@pytest.mark.parametrize("quant", ["f32", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_fused_program_gives_the_same_logits(name: str, quant: str, tmp_path: Path) -> None:
    """Bit for bit on `reference`: a fused op's reference does what the two did."""
    if name.startswith("moe") and quant in ("fp8", "nvfp4"):
        pytest.skip("experts have no such ops yet")
    folder = family_models.write(tmp_path, name)
    ids = [int(i) for i in np.random.default_rng().integers(0, family_models.VOCAB, 21)]
    apart, together = (
        run.logits(run.load(folder, "reference", quant, max_rows=32, max_seqs=2, programs=kind), ids)
        for kind in ("cpu", "cuda")
    )
    assert np.isfinite(apart).all()
    assert apart.tobytes() == together.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_is_fused(name: str) -> None:
    """All sums but the last, which the norm of chosen rows follows; all gated MLPs, but not experts."""
    apart, together = ops(programs(name, "bf16", "cpu")), ops(programs(name, "bf16", "cuda"))
    layers = family_models.config(name)["num_hidden_layers"]
    sparse = apart["moe_mlp"]
    assert together["residual_add"] == 1 and together["residual_rms_norm"] == 2 * layers - 1
    assert together["gated_activation"] == 0 and together["gated_linear"] == layers - sparse
    assert together["rms_norm"] == apart["rms_norm"] - (2 * layers - 1)
    assert together["linear"] == apart["linear"] - (layers - sparse)


def test_buffers_between_the_two_are_gone() -> None:
    apart, together = (programs("llama-biases", "bf16", kind).buffers for kind in ("cpu", "cuda"))
    assert set(apart) - set(together) == {"gate_up"}
    assert [n for n, b in apart.items() if b.kind == "weight"] == [n for n, b in together.items() if b.kind == "weight"]


def test_fp8_rounds_attention_s_rows_and_no_others() -> None:
    found = programs("qwen3", "fp8", "cuda")
    rounded = [launch for launch in found.launches() if launch.key.op == "quantize_rows"]
    assert [dict(launch.operands)["x"] for launch in rounded] == ["attended"] * 3
    by_name = {launch.name: dict(launch.key.dtypes) for launch in found.launches()}
    for name in ("layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down"):
        assert (by_name[name]["x"], by_name[name]["weight"]) == ("f8g128", "f8g128"), name
    assert by_name["lm_head"]["x"] == by_name["lm_head"]["weight"] == "bf16"
    assert by_name["layers.0.gate_up"]["out"] == "f8g128" and by_name["final_norm"]["out"] == "bf16"


def test_a_weight_kept_in_floats_takes_rows_that_are_not_rounded() -> None:
    """As checkpoints do that keep some layers in bf16 among FP8 ones."""
    config = family_models.config("qwen3")
    family = family_of(config)

    def format_of(name: str, role: str) -> str:
        return "bf16" if role == "fp8" and name.startswith("layers.1.") else {"fp8": "f8g128"}.get(role, role)

    found = fusion.record(family, family.configure(config, Shard()), recipe("fp8", "cuda"), "cuda", format_of)
    by_name = {launch.name: dict(launch.key.dtypes) for launch in found.launches()}
    for layer, dtype in (("layers.0", "f8g128"), ("layers.1", "bf16"), ("layers.2", "f8g128")):
        for part in ("qkv", "o", "gate_up", "down"):
            assert by_name[f"{layer}.{part}"]["x"] == by_name[f"{layer}.{part}"]["weight"] == dtype


def pair(**changes: Any) -> StepPrograms:
    """A linear and the activation of its product, and what `changes` says differs."""
    r = Recorder()
    for name, dtype, shape in (
        ("x", "bf16", ("n_rows", 64)),
        ("w", "bf16", (32, 64)),
        ("product", "f32", ("n_rows", 32)),
        ("other", "f32", ("n_rows", 32)),
        ("gated", "bf16", ("n_rows", 16)),
        ("again", "bf16", ("n_rows", 16)),
    ):
        r.buffer(name, dtype, shape, "weight" if name == "w" else "workspace")
    r.begin("forward")
    r.launch("linear", "linear", {"x": "x", "weight": "w", "out": "product"}, {"rows": "n_rows"}, {"n": 32, "k": 64})
    for name, out in (("activation", "gated"), *changes.get("more", ())):
        operands = {"gate_up": changes.get("of", "product"), "out": out}
        r.launch("gated_activation", name, operands, {"rows": "n_rows"}, {"intermediate": 16, "activation": 0})
    r.begin("sample")
    return r.finish()


def test_a_product_that_somebody_else_reads_is_kept() -> None:
    assert ops(fused(pair())) == {"gated_linear": 1}
    assert ops(fused(pair(more=(("second", "again"),)))) == {"linear": 1, "gated_activation": 2}
    assert ops(fused(pair(of="other"))) == {"linear": 1, "gated_activation": 1}
