"""Loading a model and running its two programs, on tiny random models."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas.debug.compare import compare, error_ratio
from atlas.errors import AtlasError, CheckpointError, ConfigError
from atlas.ops import OPS
from atlas.ops.adjust_logits import ADJUST_MASK
from atlas.ops.normed_logits import NORMED_LOGITS
from atlas.ops.op import BF16, EXACT, Op
from atlas.runtime import host
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL
from atlas.weights import open_checkpoint
from tests import tiny_model
from tests.models import run

BACKENDS = ("reference", "cpu")

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def load(folder: Path, **options: object) -> Runner:
    with open_checkpoint(folder) as checkpoint:
        return Runner.load(checkpoint, RunnerOptions(**{"backend": "reference", "quant": "f32", **options}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


def step(runner: Runner, ids: list[int], slots: list[int]) -> None:
    """One sequence per id, each of that one token."""
    block, count = runner.block, len(ids)
    block.set_symbols({"n_rows": count, "n_seqs": count, "n_logits": count})
    block.row_token[:count] = ids
    block.row_seq[:count] = block.logit_row[:count] = np.arange(count)
    block.row_position[:count] = 0
    block.seq_slot[:count] = block.logit_slot[:count] = slots
    block.block_table[:count, 0] = np.arange(count)
    block.logit_n_top[:count] = block.logit_target[:count] = -1
    block.logit_adjust[:count] = 0
    block.logit_temperature[:count] = 0.0
    runner.forward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_delivered_between_forward_and_sample_decides(model: Path, backend: str) -> None:
    """Rows 0 and 2 share a mask of one token, row 1 has none, row 3 another mask."""
    runner = load(model, backend=backend, max_seqs=4)
    step(runner, [5, 6, 7, 8], [0, 1, 2, 3])
    free = runner.sample().copy()
    mask = np.zeros((2, 10), np.uint32)
    mask[0, 123 // 32] = 1 << (123 % 32)
    mask[1, 9] = 1 << 31
    step(runner, [5, 6, 7, 8], [0, 1, 2, 3])
    runner.block.logit_mask[:4] = [0, -1, 0, 1]
    runner.block.logit_adjust[:4] = [ADJUST_MASK, 0, ADJUST_MASK, ADJUST_MASK]
    runner.forward()
    runner.deliver_mask(mask)
    assert runner.sample().tolist() == [123, free[1], 123, 319]
    assert runner.read("last_token")[:4].tolist() == [123, free[1], 123, 319]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_a_token_reads_its_slot_on_the_device(model: Path, backend: str) -> None:
    runner = load(model, backend=backend, max_seqs=4)
    step(runner, [9, 200], [3, 1])
    first = runner.sample().tolist()
    step(runner, [-1, -1], [1, 3])
    from_device = runner.read("logits")[:2].copy()
    step(runner, [first[1], first[0]], [1, 3])
    assert from_device.tobytes() == runner.read("logits")[:2].tobytes()


@pytest.mark.parametrize("quant", ["f32", "bf16"])
def test_cpu_equals_reference_buffer_by_buffer(model: Path, quant: str) -> None:
    sizes = {"max_seqs": 4, "max_rows": 16}
    runner, reference = (load(model, backend=b, quant=quant, **sizes) for b in ("cpu", "reference"))
    step(runner, [1, 2, 319], [0, 1, 2])
    differences = compare(runner, reference)
    assert len(differences) > 20
    assert max(d.ratio for d in differences) <= 1.0


def test_launches_of_the_step_s_phase_are_compared(model: Path) -> None:
    """Of programs that `reference` need not have."""
    runner, reference = (load(model, backend="reference", max_seqs=4, programs=kind) for kind in ("cuda", ""))
    for phase, there, gone in (
        (PHASE_PREFILL, "paged_attention", "rope_attention"),
        (PHASE_DECODE, "rope_attention", "paged_attention"),
    ):
        runner.block.set_phase(phase)
        step(runner, [1, 2, 319], [0, 1, 2])
        differences = compare(runner, reference)
        assert {d.ratio for d in differences} == {0.0}
        ops = [d.op for d in differences]
        assert there in ops and gone not in ops


def test_the_comparison_names_the_op_that_diverges(model: Path) -> None:
    sizes = {"max_seqs": 4, "max_rows": 16}
    runner, reference = (load(model, backend=b, **sizes) for b in ("cpu", "reference"))
    weight = runner.read("layers.1.down.weight")
    weight[3] *= 1.01
    runner.write("layers.1.down.weight", weight)
    step(runner, [1, 2, 319], [0, 1, 2])
    wrong = [d for d in compare(runner, reference) if d.ratio > 1.0]
    assert [(d.launch, d.op, d.buffer) for d in wrong] == [("layers.1.down", "linear", "logits_projected")]


def test_the_error_measure_sees_every_kind_of_difference() -> None:
    one = np.ones(3, np.float32)
    assert error_ratio(one, one, EXACT) == 0.0 and error_ratio(one + 1e-6, one, EXACT) == float("inf")
    assert error_ratio(np.array([np.nan, 1]), np.array([1.0, 1]), BF16) == float("inf")
    assert error_ratio(np.array([np.inf, 1]), np.array([-np.inf, 1]), BF16) == float("inf")
    assert error_ratio(np.array([-np.inf, 1]), np.array([-np.inf, 1]), BF16) == 0.0
    assert error_ratio(one * (1 + BF16.rtol * 2), one, BF16) > 1.0


def test_an_id_of_another_group_is_an_error() -> None:
    """Known failure: the bound grew with the vocabulary, and no id was ever wrong."""
    ids = np.array([5, 319, 128000], np.float32)
    tolerance = NORMED_LOGITS.bound("i32", {})
    one_off = ids + np.float32([0, 16, 0])
    assert error_ratio(ids + 15, ids, tolerance) == 1.0 < error_ratio(one_off, ids, tolerance)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_context": 257}, ConfigError, "max_context: 257; accepted: 1..256, the model's own limit"),
        ({"max_seqs": 0}, ConfigError, "max_seqs: 0; accepted: an integer of at least 1"),
        ({"max_rows": 4, "max_seqs": 8}, ConfigError, "max_rows: 4 is below max_seqs 8"),
        (
            {"kv_memory_bytes": 100},
            ConfigError,
            "kv_memory: 100 bytes hold no KV block; accepted: at least 16384 bytes",
        ),
        ({"kv_memory_bytes": 40_000, "max_context": 256}, AtlasError, "kv_memory: 40000 bytes hold 32 tokens"),
        ({"kv_dtype": "bf16"}, ConfigError, "kv_dtype: 'bf16' with quant f32; accepted: f32"),
        ({"quant": "int3"}, ConfigError, "unknown quant 'int3'; accepted: bf16, f32"),
    ],
)
def test_options_that_cannot_be_honoured(
    model: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        load(model, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
def test_the_context_is_what_was_asked_for(model: Path, tokens: int) -> None:
    """Not what whole KV blocks hold."""
    assert load(model, max_context=tokens).max_context == tokens


def test_a_small_cache_shortens_the_context(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = load(model, kv_memory_bytes=5 * 16384)
    assert runner.max_context == 80 and "max_context is 80 instead of the model's 256" in caplog.text


def test_a_kernel_of_another_contract_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = dataclasses.replace(OPS["rms_norm"], dims=("rows", "more"))
    assert changed.contract_hash() != OPS["rms_norm"].contract_hash()
    monkeypatch.setattr(Op, "contract_hash", lambda op: "0" * 16)
    with pytest.raises(AtlasError, match="contract"):
        load(model, backend="cpu")


def test_the_cache_takes_its_share_of_the_memory_and_no_more_than_it_can_use(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 16384
    monkeypatch.setattr(host, "available_memory", lambda: 4 * 100 * block)
    assert load(model, max_seqs=32).limits.n_blocks == 100
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 40)
    assert load(model, max_seqs=4).limits.n_blocks == 4 * 256 // 16


def test_the_load_is_accounted_for(model: Path) -> None:
    stages: list[str] = []
    with open_checkpoint(model) as checkpoint:
        runner = Runner.load(checkpoint, RunnerOptions(backend="reference", quant="f32"), stages.append)
    assert [name for name, _ in runner.ledger] == stages == ["configure", "memory", "weights", "programs", "warm up"]
    assert all(seconds > 0 for _, seconds in runner.ledger)


@pytest.mark.parametrize(
    ("changes", "drop", "message"),
    [
        ({}, ("model.layers.1.mlp.down_proj.weight",), "tensor model.layers.1.mlp.down_proj.weight is missing"),
        ({}, ("lm_head.weight",), "tensor lm_head.weight is missing"),
        ({"num_hidden_layers": 3}, ("model.layers.2.input_layernorm.weight",), "model.layers.2.input_layernorm.weight"),
    ],
)
def test_a_missing_tensor_is_named(
    tmp_path: Path, changes: dict[str, object], drop: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tiny_model.write(tmp_path, drop=drop, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "shape", "message"),
    [
        (
            "model.layers.0.mlp.down_proj.weight",
            (64, 95),
            r"down_proj.weight has shape \[64, 95\]; accepted: \[64, 96\]",
        ),
        ("model.embed_tokens.weight", (319, 64), r"embed_tokens.weight has shape \[319, 64\]; accepted: \[320, 64\]"),
        (
            "model.layers.0.self_attn.k_proj.weight",
            (32, 64),
            r"k_proj.weight has shape \[32, 64\]; accepted: \[64, 64\]",
        ),
        ("model.layers.1.mlp.up_proj.weight", (97, 64), r"up_proj.weight has shape \[97, 64\]; accepted: \[96, 64\]"),
        ("model.norm.weight", (63,), r"model.norm.weight has shape \[63\]; accepted: \[64\]"),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    tmp_path: Path, tensor: str, shape: tuple[int, ...], message: str
) -> None:
    folder = tiny_model.write(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights[tensor] = np.zeros(shape, np.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_bias_that_nothing_would_apply_is_refused(tmp_path: Path) -> None:
    folder = tiny_model.write(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(128, np.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj.bias is a bias that would not be applied; .* check config.json"):
        load(folder)
    weights["model.layers.0.self_attn.q_proj.bias"][:] = 0  # GPTQ tools write zeros for every module
    save_file(weights, folder / "model.safetensors")
    load(folder)


def test_a_head_of_its_own_is_used_whatever_config_json_says(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers: a fine-tune whose head was trained on its own while the config stayed tied."""
    told, weights = tiny_model.write(tmp_path / "told"), load_file(model / "model.safetensors")
    (told / "config.json").write_text(json.dumps({**tiny_model.CONFIG, "tie_word_embeddings": True}))
    options = {"max_logits": 8, "max_rows": 32}
    expected = run.logits(load(model, **options), [1, 2, 3])
    for quant in ("f32", "bf16"):
        run.logits(load(told, **options, quant=quant), [1, 2, 3])
    np.testing.assert_array_equal(run.logits(load(told, **options), [1, 2, 3]), expected)
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text
    caplog.clear()
    # One matrix, saved under both names, or under either.
    table = weights["model.embed_tokens.weight"]
    found = []
    for names in (("model.embed_tokens", "lm_head"), ("model.embed_tokens",), ("lm_head",)):
        rest = {name: array for name, array in weights.items() if "embed" not in name and "head" not in name}
        save_file(rest | {f"{name}.weight": table for name in names}, told / "model.safetensors")
        found.append(run.logits(load(told, **options), [1, 2, 3]))
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes() != expected.tobytes()
    assert "differs" not in caplog.text


def test_a_file_saved_without_the_prefix_of_its_model(tmp_path: Path, model: Path) -> None:
    folder, weights = tiny_model.write(tmp_path), load_file(model / "model.safetensors")
    save_file({name.removeprefix("model."): array for name, array in weights.items()}, folder / "model.safetensors")
    options = {"max_logits": 8, "max_rows": 32}
    expected = run.logits(load(model, **options), [1, 2, 3])
    np.testing.assert_array_equal(run.logits(load(folder, **options), [1, 2, 3]), expected)


def test_leftover_rotary_buffers_are_harmless(tmp_path: Path, model: Path) -> None:
    folder = tiny_model.write(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.full(16, 3.0, np.float32)
    save_file(weights, folder / "model.safetensors")
    assert run.logits(load(folder, max_logits=8, max_rows=32), [1, 2, 3]).tobytes() == (
        run.logits(load(model, max_logits=8, max_rows=32), [1, 2, 3]).tobytes()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["SpiralForCausalLM"]}, "architecture 'SpiralForCausalLM' is not supported"),
        ({"architectures": None, "model_type": "spiral"}, "architectures is None"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; accepted: silu, swish, gelu_pytorch_tanh"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling type 'spiral' is not known"),
        ({"rope_scaling": {"rope_type": "linear"}}, "required field 'factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0.0; accepted: a number in 1e-30..1e+30"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor is -2.0"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling {'factor': 2.0} names no rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 0}}, "factor is 0.0"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low below high"),
        ({"rope_theta": 0}, "rope_theta is 0.0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "wobble"}}, "quantization_config.quant_method is 'wobble'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"attention_bias": 3}, "attention_bias is 3"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000"),
        ({"head_dim": 33}, "head_dim is 33; accepted: an even number"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    folder = tiny_model.write(tmp_path)
    import json

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "config.json" in str(caught.value) and message in str(caught.value)


def test_nothing_is_left_open(model: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        load(model)
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before


def test_a_poisoned_workspace_changes_no_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATLAS_POISON=1: a step begins with NaNs everywhere in its workspace, and none of them is read."""
    clean = run.greedy(load(model, backend="cpu"), [[1, 2, 3], [4, 5]], 12, 2)
    monkeypatch.setenv("ATLAS_POISON", "1")
    runner = load(model, backend="cpu")
    assert run.greedy(runner, [[1, 2, 3], [4, 5]], 12, 2) == clean
    runner.backend.begin_step(runner.plan.offsets["step.header"], runner.step_memory, runner.block.used_bytes())
    begin, end = runner.plan.regions["workspace"]
    workspace = np.empty(end - begin, np.uint8)
    runner.backend.read(begin, workspace)
    assert workspace.size > 0 and (workspace == 0xFF).all()
