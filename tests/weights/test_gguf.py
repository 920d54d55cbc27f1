"""GGUF tensors and configuration, against the `gguf` package that wrote or dequantised them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from atlas.errors import CheckpointError
from atlas.targets.rope import rope
from atlas.weights import open_checkpoint
from atlas.weights.gguf_header import read_header
from tests.weights.gguf_files import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    K_QUANTS,
    KV_HEADS,
    NAMES,
    ROUND_TRIP,
    VOCAB,
    converter_permute,
    hf_weights,
    stored,
    with_types,
    write,
)

pytestmark = pytest.mark.usefixtures("cache")


def test_float_weights_come_back_in_hugging_face_order(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf"))
    assert set(checkpoint.tensors) == {f"{name}.weight" for name in NAMES.values()}
    for stem, weight in hf_weights().items():
        name = f"{NAMES[stem]}.weight"
        array = checkpoint.read(name)
        assert array.dtype == np.float32 and array.flags.c_contiguous
        assert checkpoint.tensors[name].shape == weight.shape
        np.testing.assert_array_equal(array, weight)


@pytest.mark.parametrize(
    "types", [ROUND_TRIP, K_QUANTS, (Q.F16,), (Q.BF16,)], ids=["blocks", "k-quants", "f16", "bf16"]
)
def test_every_type_is_exact(tmp_path: Path, types: tuple[Q, ...]) -> None:
    every = with_types(types)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors=every))
    for stem, weight in hf_weights().items():
        array, kind = every[f"{stem}.weight"]
        name = f"{NAMES[stem]}.weight"
        assert kind is not None and checkpoint.tensors[name].dtype == kind.name
        got = checkpoint.read(name)
        expected_type = {Q.F16: np.float16, Q.BF16: ml_dtypes.bfloat16}.get(kind, np.float32)
        assert got.dtype == expected_type and got.shape == weight.shape and got.flags.c_contiguous
        expected = gguf.quants.dequantize(array, kind).reshape(weight.shape)
        # Applying the converter's own permutation again gives the stored order.
        np.testing.assert_array_equal(stored(stem, got.astype(np.float32)), expected)


@pytest.mark.parametrize("kind", [Q.BF16, Q.Q4_0])
def test_the_place_of_a_tensor_holds_what_is_read(tmp_path: Path, kind: Q) -> None:
    """Where the file has it so: not quantised, and no rows of heads, which GGUF has in another order."""
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors=with_types((kind,))))
    without = {name for name in checkpoint.tensors if checkpoint.place(name) is None}
    if kind == Q.Q4_0:
        assert without >= {name for name, info in checkpoint.tensors.items() if info.scheme}
    else:
        assert {".".join(name.split(".")[-3:-1]) for name in without} >= {"self_attn.q_proj", "self_attn.k_proj"}
        assert {
            "model.embed_tokens.weight",
            "model.layers.0.mlp.down_proj.weight",
        } <= checkpoint.tensors.keys() - without
    for name in checkpoint.tensors.keys() - without:
        file, offset = checkpoint.place(name) or (-1, -1)
        array = checkpoint.read(name)
        assert os.pread(file, array.nbytes, offset) == array.tobytes(), name
    open_files = len(os.listdir("/proc/self/fd"))
    checkpoint.close()
    assert len(os.listdir("/proc/self/fd")) == open_files - (kind == Q.BF16)


def test_biases_and_own_lm_head(tmp_path: Path) -> None:
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    every: dict[str, tuple[np.ndarray, Q | None]] = with_types((Q.F16,))
    every["blk.0.attn_q.bias"] = converter_permute(bias, HEADS), None
    every["output.weight"] = np.ones((VOCAB, HIDDEN), np.float32), None
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors=every))
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), bias)
    assert checkpoint.config["tie_word_embeddings"] is False
    announced = {name: checkpoint.config[name] for name in ("attention_bias", "qkv_bias", "mlp_bias")}
    assert announced == {"attention_bias": False, "qkv_bias": True, "mlp_bias": False}
    assert "lm_head.weight" in checkpoint.tensors


def test_smollm2_agrees_with_the_package(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    reader = gguf.GGUFReader(smollm2_path)
    header = read_header(smollm2_path)
    assert header.metadata == {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    assert {
        tensor.name: (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())), int(tensor.data_offset))
        for tensor in reader.tensors
    } == {name: (tensor.type, tensor.shape, tensor.offset) for name, tensor in header.tensors.items()}
    stored_tensors = {tensor.name: tensor for tensor in reader.tensors}
    for ours, theirs, heads in (
        ("model.embed_tokens.weight", "token_embd.weight", 0),
        ("model.layers.7.self_attn.k_proj.weight", "blk.7.attn_k.weight", 3),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", 0),
    ):
        tensor = stored_tensors[theirs]
        got = checkpoint.read(ours)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(converter_permute(got, heads) if heads else got, expected)
    assert checkpoint.config["rope_theta"] == 100000.0
    assert len(checkpoint.tensors) == 272


# ---- configuration -------------------------------------------------------------------------------


def test_config_is_spelled_as_hugging_face_does(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf"))
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,  # not 9.999999747378752e-06, its float32 neighbour
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "qkv_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert checkpoint.generation_config == {"bos_token_id": 0, "eos_token_id": [1]}


def test_absent_optional_fields_have_llama_cpps_defaults(tmp_path: Path) -> None:
    optional = ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count")
    config = open_checkpoint(write(tmp_path / "m.gguf", without=optional)).config
    assert (config["num_key_value_heads"], config["rope_theta"], config["head_dim"]) == (HEADS, 10000.0, HEAD_DIM)


@pytest.mark.parametrize(
    "field",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_required_field_is_named(tmp_path: Path, field: str) -> None:
    path = write(tmp_path / "m.gguf", without=(field,))
    with pytest.raises(CheckpointError, match=rf"m\.gguf: metadata field llama\.{field} is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("llama.expert_count", 8, gguf.GGUFValueType.UINT32),
        ("llama.attention.scale", 0.5, gguf.GGUFValueType.FLOAT32),
        ("llama.logit_scale", 0.5, gguf.GGUFValueType.FLOAT32),
        ("llama.rope.scaling.type", "spiral", gguf.GGUFValueType.STRING),
        ("llama.attention.value_length", 32, gguf.GGUFValueType.UINT32),
    ],
)
def test_arithmetic_that_is_not_built_is_refused(
    tmp_path: Path, key: str, value: Any, kind: gguf.GGUFValueType
) -> None:
    path = write(tmp_path / "m.gguf", extra=lambda writer: writer.add_key_value(key, value, kind))
    with pytest.raises(CheckpointError, match=f"{key} is '?{value}"):
        open_checkpoint(path)


def test_unknown_field_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_checkpoint(write(tmp_path / "m.gguf", extra=lambda writer: writer.add_uint32("llama.brand_new", 1)))
    assert "llama.brand_new" in caplog.text


def test_wrong_value_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        without=("block_count",),
        extra=lambda writer: writer.add_key_value(
            "llama.block_count", [1, 2], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32
        ),
    )
    with pytest.raises(CheckpointError, match=r"llama\.block_count is \[1, 2\]; accepted: one integer"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    expected: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        expected["original_max_position_embeddings"] = 32
    assert open_checkpoint(write(tmp_path / "m.gguf", extra=extra)).config["rope_scaling"] == expected


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "m.gguf", extra=lambda writer: writer.add_float32(f"llama.{key}", 4.0))
    assert open_checkpoint(path).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def llama3_factors(factor: float, theta: float, dim: int) -> np.ndarray:
    """As Llama 3's reference code defines them, one frequency at a time."""
    result = []
    for index in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (index / dim)
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192 / 1:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


def test_frequency_factors_become_rope_scaling(tmp_path: Path) -> None:
    """Llama 3's: the file has the divisors that its four parameters give, config.json the parameters."""
    every: dict[str, tuple[np.ndarray, Q | None]] = with_types((Q.F16,))
    every["rope_freqs.weight"] = llama3_factors(32.0, 50000.0, HEAD_DIM), None
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors=every))
    assert not any("rope" in name for name in checkpoint.tensors)
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    stated = {**checkpoint.config, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, **parameters}}
    (expected,), (found,) = (rope(config, HEAD_DIM).inv_freq for config in (stated, checkpoint.config))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    every["rope_freqs.weight"] = every["rope_freqs.weight"][0][1:], None
    with pytest.raises(CheckpointError, match=f"factors has {HEAD_DIM // 2 - 1} entries"):
        rope(open_checkpoint(write(tmp_path / "n.gguf", tensors=every)).config, HEAD_DIM)


def test_frequency_factors_beside_another_scheme_are_refused(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(4.0)

    every: dict[str, tuple[np.ndarray, Q | None]] = with_types((Q.F16,))
    every["rope_freqs.weight"] = llama3_factors(32.0, 50000.0, HEAD_DIM), None
    with pytest.raises(CheckpointError, match=r"frequency factors factors beside rope\.scaling\.type linear"):
        open_checkpoint(write(tmp_path / "m.gguf", tensors=every, extra=extra))


def test_a_window_makes_a_mistral(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", extra=lambda writer: writer.add_sliding_window(4096))
    config = open_checkpoint(path).config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 4096)


def test_unknown_architecture_and_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'nope'; accepted: llama"):
        open_checkpoint(write(tmp_path / "a.gguf", architecture="nope"))
    every = with_types((Q.F16,))
    every["blk.0.attn_sub_norm.weight"] = np.ones(HIDDEN, np.float32), None
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sub_norm\.weight is not known"):
        open_checkpoint(write(tmp_path / "b.gguf", tensors=every))
