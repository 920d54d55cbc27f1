"""Shapes of models with experts, gated delta net layers and nested configurations; the public facts."""

import json
from pathlib import Path
from typing import Any

import pytest

from atlas.errors import CheckpointError, ConfigError
from atlas.targets.quant import DTYPE_BYTES, QUANTS, RECIPES, recipe
from atlas.targets.resolution import facts
from atlas.targets.shape import Shard, shape, text_config

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
FACTS = facts(KERNELS)
HYBRID = FACTS["tiny-hybrid"]


def test_every_model_of_the_issue_has_facts_and_says_where_from() -> None:
    assert set(FACTS) >= {
        *("llama-3-8b", "llama-3.2-1b", "qwen3-8b", "qwen3-0.6b", "smollm2-135m", "qwen3-30b-a3b"),
        *("qwen3.6-35b-a3b", "qwen3-next-80b-a3b", "qwen3.5-122b-a10b", "qwen3.8-27b", "tiny-hybrid"),
    }
    hashes = {shape(config).hash() for config in FACTS.values()}
    assert len(hashes) == len(FACTS)
    for config in FACTS.values():
        assert len(config["source"]) > 20


def test_dense_shapes_keep_the_hash_that_existing_kernels_are_keyed_by() -> None:
    assert shape(FACTS["smollm2-135m"]).hash() == "7d05c8c52ef9f3fd"
    assert shape(FACTS["llama-3.2-1b"]).hash() == "91b3283a76906654"


# Parameters by name, in billions, beside what the shape gives: a typing error in the facts shows.
@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("llama-3.2-1b", 1.236),
        ("llama-3-8b", 8.03),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.19),
        ("qwen2.5-0.5b", 0.494),
        ("mistral-7b", 7.24),
        ("phi-3-mini-4k", 3.82),
        ("granite-3.1-2b", 2.53),
        ("gemma-3-1b", 1.0),
        ("gemma-3-270m", 0.268),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-next-80b-a3b", 79.67),
        ("qwen3.6-35b-a3b", 34.66),
        ("qwen3.5-122b-a10b", 122.1),
        ("qwen3.8-27b", 26.9),
    ],
)
def test_the_facts_give_the_models_published_size(model: str, billions: float) -> None:
    config, s = text_config(FACTS[model]), shape(FACTS[model])
    layers = config["num_hidden_layers"]
    linear_layers = layers - layers // 4 if s.n_linear_value_heads else 0
    q_size, kv_size = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    attention = s.hidden_size * (q_size * (2 + s.attention_gate) + 2 * kv_size)
    keys, values = s.n_linear_key_heads * s.linear_key_head_dim, s.n_linear_value_heads * s.linear_value_head_dim
    linear = s.hidden_size * (2 * keys + 3 * values + 2 * s.n_linear_value_heads)
    mlp = s.intermediate_size + s.n_experts * s.moe_intermediate_size + s.shared_expert_size
    total = (layers - linear_layers) * attention + linear_layers * linear
    total += layers * s.hidden_size * (3 * mlp + s.n_experts)
    total += s.vocab_size * s.hidden_size * (1 if config["tie_word_embeddings"] else 2)
    assert total / 1e9 == pytest.approx(billions, rel=0.01)


def test_experts_and_delta_net_are_part_of_the_shape() -> None:
    s = shape(HYBRID)
    assert (s.n_experts, s.n_local_experts, s.experts_per_token) == (16, 16, 4)
    assert (s.moe_intermediate_size, s.shared_expert_size, s.intermediate_size) == (128, 128, 0)
    assert (s.n_linear_key_heads, s.n_linear_value_heads, s.conv_kernel) == (4, 8, 4)
    assert (s.linear_key_head_dim, s.linear_value_head_dim) == (64, 64)
    assert (s.qk_norm, s.attention_gate, s.rotary_dim) == (True, True, 16)
    dense = shape(FACTS["qwen3-8b"])
    assert (dense.qk_norm, dense.attention_gate, dense.rotary_dim, dense.n_experts) == (True, False, 0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 32),
        ("num_experts_per_tok", 2),
        ("moe_intermediate_size", 256),
        ("shared_expert_intermediate_size", None),
        ("linear_num_key_heads", 8),
        ("linear_num_value_heads", 16),
        ("linear_key_head_dim", 32),
        ("linear_value_head_dim", 32),
        ("linear_conv_kernel_dim", 3),
        ("attn_output_gate", False),
        ("rope_parameters", {"rope_theta": 1e7, "partial_rotary_factor": 0.5}),
        ("architectures", ["LlamaForCausalLM"]),
    ],
)
def test_every_such_constant_changes_the_hash(field: str, value: Any) -> None:
    assert shape({**HYBRID, field: value}).hash() != shape(HYBRID).hash()


def test_layers_that_a_model_lacks_leave_nothing_in_its_shape() -> None:
    assert shape({**HYBRID, "layer_types": ["full_attention"] * 8}).n_linear_value_heads == 0
    dense = {**HYBRID, "num_experts": None, "intermediate_size": 640}
    assert shape(dense).n_experts == 0 and shape(dense).intermediate_size == 640
    # Qwen3-30B-A3B states an intermediate_size that none of its layers has.
    moe = FACTS["qwen3-30b-a3b"]
    assert shape(moe).intermediate_size == 0
    assert shape({**moe, "mlp_only_layers": [0]}).intermediate_size == 6144
    assert shape({**moe, "decoder_sparse_step": 2}).intermediate_size == 6144


def test_a_nested_text_config_gives_the_shape_of_the_flat_one() -> None:
    inner = {k: v for k, v in HYBRID.items() if k not in ("architectures", "tie_word_embeddings")}
    nested = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": inner,
    }
    assert shape(nested) == shape(HYBRID)
    flat = text_config({**nested, "text_config": {**inner, "tie_word_embeddings": None}})
    assert flat["tie_word_embeddings"] is True and flat["architectures"] == nested["architectures"]
    assert "text_config" not in flat and text_config(HYBRID) is HYBRID
    with pytest.raises(CheckpointError, match="text_config is 3; accepted: an object"):
        shape({"text_config": 3})


def test_a_shard_divides_experts_and_delta_net_too() -> None:
    part = shape(HYBRID, Shard(tp_rank=1, tp_size=2, expert_begin=4, expert_end=8))
    assert (part.n_experts, part.n_local_experts, part.experts_per_token) == (16, 4, 4)
    assert (part.moe_intermediate_size, part.shared_expert_size) == (64, 64)
    assert (part.n_linear_key_heads, part.n_linear_value_heads) == (2, 4)
    assert (part.linear_key_head_dim, part.conv_kernel, part.rotary_dim) == (64, 4, 16)
    # Ranks hold different experts but the same number: one kernel set serves them all.
    assert shape(HYBRID, Shard(expert_begin=0, expert_end=4)) == shape(HYBRID, Shard(expert_begin=12, expert_end=16))


@pytest.mark.parametrize(
    ("changes", "shard", "message"),
    [
        ({}, Shard(tp_size=4), "shard: tp_size 4 does not divide num_key_value_heads 2"),
        ({"moe_intermediate_size": 129}, Shard(tp_size=2), "tp_size 2 does not divide moe_intermediate_size 129"),
        (
            {"shared_expert_intermediate_size": 3},
            Shard(tp_size=2),
            "tp_size 2 does not divide shared_expert_intermediate_size 3",
        ),
        (
            {"linear_num_key_heads": 1},
            Shard(tp_size=2),
            "tp_size 2 does not divide linear_num_key_heads 1",
        ),
        ({}, Shard(expert_begin=8, expert_end=8), "experts 8..8 of 16; accepted: 0 <= begin < end <= 16"),
        ({}, Shard(expert_begin=8, expert_end=17), "experts 8..17 of 16"),
        ({}, Shard(expert_begin=-1), "experts -1..16 of 16"),
        ({"num_experts": 0, "intermediate_size": 8}, Shard(expert_end=4), "experts 0..4 of a model without experts"),
        ({}, Shard(tp_rank=2, tp_size=2), "tp_rank 2 of tp_size 2; accepted: 0 <= tp_rank < tp_size"),
        ({"num_experts_per_tok": 17}, Shard(), "num_experts_per_tok 17 exceeds num_experts 16"),
        ({"num_experts": None}, Shard(), "required field 'intermediate_size' is missing"),
        ({"moe_intermediate_size": None}, Shard(), "required field 'moe_intermediate_size' is missing"),
        (
            {"linear_num_value_heads": 6},
            Shard(),
            "linear_num_value_heads 6 is no multiple of linear_num_key_heads 4",
        ),
        ({"linear_conv_kernel_dim": None}, Shard(), "required field 'linear_conv_kernel_dim' is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, Shard(), "partial_rotary_factor is 1.5 of head_dim 64"),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}}, Shard(), "partial_rotary_factor is 0.3 of head_dim 64"),
        ({"attn_output_gate": 1}, Shard(), "attn_output_gate is 1; accepted: a value of type bool"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], shard: Shard, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        shape({**HYBRID, **changes}, shard)
    assert message in str(caught.value)


def test_every_quant_is_a_recipe_and_only_some_can_be_recorded() -> None:
    assert set(QUANTS) == {"f32", "bf16", "fp8", "nvfp4", "int4", "int8"}
    assert set(RECIPES) == {"f32", "bf16"} <= set(DTYPE_BYTES)
    for name, found in QUANTS.items():
        assert recipe(name) is found and found.name == name == found.projections
    assert (QUANTS["nvfp4"].experts, QUANTS["nvfp4"].lm_head, QUANTS["nvfp4"].router) == ("nvfp4", "bf16", "bf16")
    assert (recipe("fp8").activations, recipe("fp8").attention) == ("f8g128", "bf16")
    assert [recipe("fp8").entering(weight) for weight in ("f8", "f8g128", "bf16")] == ["f8g128", "f8g128", "bf16"]
    assert [recipe("nvfp4").entering(weight) for weight in ("nvfp4", "bf16")] == ["bf16", "bf16"]
    assert recipe("f32").entering("f32") == "f32"
    assert (recipe("int4", "cpu").projections, recipe("int8", "cpu").projections) == ("int4m", "int8")
    with pytest.raises(ConfigError, match="unknown quant 'fp4'; accepted: bf16, f32, fp8, int4, int8, nvfp4; nearest"):
        recipe("fp4")


def test_facts_are_config_json_spelling() -> None:
    """No key that a config.json would not have, but `source`."""
    for name in FACTS:
        text = (KERNELS / "models" / f"{name}.json").read_text()
        assert json.loads(text) == FACTS[name] and text.endswith("}\n")
