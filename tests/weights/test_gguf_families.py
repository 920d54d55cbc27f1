"""Every family as a GGUF, converted by the rules of llama.cpp's converter: the same model as its safetensors.

Names of tensors come from the `gguf` package's own tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from atlas.errors import CheckpointError
from atlas.models import FAMILIES, ModelConfig, family_of
from atlas.targets.shape import Shard
from atlas.weights import gguf_names, open_checkpoint
from atlas.weights.gguf_config import config_from_metadata
from tests import family_models
from tests.family_models import Array
from tests.weights.gguf_files import TOKENS, converter_permute

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
}

CASES = {
    **{"llama-biases": {}, "mistral-full": {}, "mistral-window": {}, "qwen2-tied": {}, "qwen3": {}, "moe": {}},
    **{"llama-yarn": {}, "phi3-partial": {}, "phi3-window": {}},
    **{"phi3-long": {}, "granite": {}, "granite-biases": {}, "gemma3": {"sliding_window_pattern": 6}},
    "gemma3-scaled": {"sliding_window_pattern": 6, "query_pre_attn_scalar": 64, "rope_local_base_freq": 10000.0},
}
"""Cases that the converter can express, with what GGUF has no field for set to what llama.cpp does."""


def convert(path: Path, config: dict[str, Any], tensors: dict[str, Array], family: str) -> Path:
    """A float32 GGUF of a checkpoint."""
    architecture, layers = ARCHITECTURES[family], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 1e6 if family == "gemma3" else 1e4))
    writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    _rope(writer, config)
    if family == "moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, array in _stacked(tensors, config).items():
        if architecture in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GRANITE):
            if ".q_proj." in name:
                array = converter_permute(array, config["num_attention_heads"])
            if ".k_proj." in name:
                array = converter_permute(array, config["num_key_value_heads"])
        if family == "gemma3" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(stretch) / np.log(original))))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(scaling[f"{length}_factor"], np.float32))


def _stacked(tensors: dict[str, Array], config: dict[str, Any]) -> dict[str, Array]:
    """Experts in one tensor for each projection, as `experts.gate_proj`."""
    result = {name: array for name, array in tensors.items() if ".experts." not in name}
    for name in tensors:
        if ".experts.0." in name:
            parts = [tensors[name.replace(".experts.0.", f".experts.{i}.")] for i in range(config["num_experts"])]
            result[name.replace(".experts.0.", ".experts.")] = np.stack(parts)
    return result


def configured(config: dict[str, Any]) -> ModelConfig:
    return family_of(config).configure(config, Shard())


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_gguf_is_the_model_that_its_safetensors_are(tmp_path: Path, name: str) -> None:
    family, config = family_models.CASES[name][0], {**family_models.config(name), **CASES[name]}
    tensors = family_models.tensors(config, 3)
    checkpoint = open_checkpoint(convert(tmp_path / "m.gguf", config, tensors, family))
    found, expected = configured(checkpoint.config), configured(config)
    for kind, rope in expected.ropes.items():
        np.testing.assert_allclose(found.ropes[kind].inv_freq, rope.inv_freq, rtol=1e-6)
        assert found.ropes[kind].scale == pytest.approx(rope.scale, rel=1e-6)
        assert found.ropes[kind].original_length == rope.original_length
    same = ("max_context", "tied", "layers", "norm_offset", "logits_scale")
    assert {field: getattr(found, field) for field in same} == {field: getattr(expected, field) for field in same}
    if name != "phi3-long":  # its scale of cos and sin has passed through float32
        assert found.shape == expected.shape
    assert set(checkpoint.tensors) == set(tensors)
    for tensor, array in tensors.items():
        got = checkpoint.read(tensor)
        assert checkpoint.tensors[tensor].shape == array.shape == got.shape
        # Gemma's norms lose their last bits where llama.cpp stores 1 + w.
        np.testing.assert_allclose(got, array, rtol=0, atol=1e-7 if family == "gemma3" and got.ndim == 1 else 0)


def test_experts_are_read_by_rows(tmp_path: Path) -> None:
    config = family_models.config("moe")
    tensors = family_models.tensors(config, 4)
    checkpoint = open_checkpoint(convert(tmp_path / "m.gguf", config, tensors, "moe"))
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    np.testing.assert_array_equal(checkpoint.read(name, slice(16, 40)), tensors[name][16:40])
    with pytest.raises(CheckpointError, match="experts.6.down_proj"):
        checkpoint.read(name.replace("experts.5", "experts.6"))


def test_the_27b_gemma_scales_scores_by_the_share_of_a_head(tmp_path: Path) -> None:
    """llama.cpp tells it by its number of layers; the file does not say."""
    config = {**family_models.config("gemma3"), "num_hidden_layers": 62, "hidden_size": 128}
    embedding = {"model.embed_tokens.weight": np.zeros((family_models.VOCAB, 128), np.float32)}
    checkpoint = open_checkpoint(convert(tmp_path / "m.gguf", config, embedding, "gemma3"))
    assert checkpoint.config["query_pre_attn_scalar"] == 32
    assert json.loads(json.dumps(checkpoint.config)) == checkpoint.config


def test_a_tensor_of_another_architecture_is_named(tmp_path: Path) -> None:
    config = family_models.config("qwen3")
    path = convert(tmp_path / "m.gguf", config, family_models.tensors(config, 1), "qwen3")
    data = path.read_bytes()
    assert data.count(b"blk.1.attn_q_norm.weight") == 1
    (tmp_path / "n.gguf").write_bytes(data.replace(b"blk.1.attn_q_norm.weight", b"blk.1.attn_x_norm.weight"))
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.attn_x_norm\.weight is not known .* tensors of qwen3"):
        open_checkpoint(tmp_path / "n.gguf")


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3", "phi3", "granite"])
def test_absurd_metadata_is_an_error_of_ours_or_none(name: str) -> None:
    values: list[Any] = [0, -1, 7, 1 << 40, 1.5, float("nan"), float("inf"), "yarn", True, [], [1, 2], [True, False]]
    architecture = gguf_names.ARCHITECTURES[name]
    plain = {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **({"expert_count": 4, "expert_used_count": 2} if name == "qwen3moe" else {}),
    }
    metadata = {"general.architecture": name, **{f"{name}.{field}": value for field, value in plain.items()}}
    fields = {*plain, *architecture.fields, "rope.freq_base", "rope.dimension_count", "attention.key_length"}
    fields |= {f"rope.scaling.{end}" for end in ("type", "factor", "original_context_length", "attn_factor")}
    refused = 0
    for field in fields:
        for value in values:
            try:
                config = config_from_metadata({**metadata, f"{name}.{field}": value}, (), 320, "m.gguf")
                if config["architectures"][0] in FAMILIES:
                    configured(config)
            except CheckpointError:
                refused += 1
    assert len(fields) < refused < len(fields) * len(values)
