"""config.json of every family: what is applied, what is assumed where it is silent, what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from atlas.errors import CheckpointError
from atlas.models import FAMILIES, ModelConfig, family_of
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from tests import family_models

PLAIN = {
    "llama": "llama-gelu",
    "mistral": "mistral-full",
    "qwen2": "qwen2-tied",
    "qwen3": "qwen3",
    "moe": "moe",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "granite": "granite",
}
"""A case of each family with as few options as it has."""


def configure(config: dict[str, Any]) -> ModelConfig:
    return family_of(config).configure(config, Shard())


def case(family: str, **changes: Any) -> dict[str, Any]:
    """The family's plain config.json with changes; a change to ... removes the field."""
    config = {**family_models.config(PLAIN[family]), **changes}
    return {name: value for name, value in config.items() if value is not ...}


def windows(config: ModelConfig) -> list[int]:
    return [layer.window for layer in config.layers]


@pytest.mark.parametrize("name", sorted(family_models.CASES))
def test_every_case_is_recorded_in_both_recipes(name: str) -> None:
    config = family_models.config(name)
    for quant in ("f32", "bf16"):
        programs = family_of(config).record(configure(config), recipe(quant))
        weights = {buffer.name for buffer in programs.buffers.values() if buffer.kind == "weight"}
        assert weights == set(family_of(config).weights(configure(config), ()))


@pytest.mark.parametrize("absent", [None, []])
@pytest.mark.parametrize("name", sorted(family_models.CASES))
def test_the_model_type_stands_for_an_absent_architecture(name: str, absent: object) -> None:
    config = family_models.config(name)
    assert configure({**config, "architectures": absent}) == configure(config)


def test_more_experts_than_a_file_could_name_are_refused_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"num_experts is 16777216 in \d+ layers; accepted: at most 131072"):
        configure(case("moe", num_experts=1 << 24))


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError) as caught:
        configure({"architectures": ["NopeForCausalLM"]})
    assert all(name in str(caught.value) for name in (*FAMILIES, "NopeForCausalLM"))


@pytest.mark.parametrize("family", sorted(PLAIN))
def test_the_head_is_tied_where_the_family_ties_it_by_default(family: str) -> None:
    for value in (..., None):
        assert configure(case(family, tie_word_embeddings=value)).tied is (family == "gemma3")


@pytest.mark.parametrize(
    ("family", "field", "absent", "null"),
    [
        ("qwen3", "head_dim", 128, 128),
        ("gemma3", "head_dim", 256, 256),
        ("llama", "head_dim", 32, 32),
        ("moe", "num_key_value_heads", 4, 4),
        ("llama", "num_key_value_heads", 4, 4),
    ],
)
def test_heads_that_are_not_stated(family: str, field: str, absent: int, null: int) -> None:
    for value, expected in ((..., absent), (None, null)):
        shape = configure(case(family, **{field: value})).shape
        assert (shape.head_dim if field == "head_dim" else shape.n_kv_heads) == expected


def test_windows() -> None:
    assert windows(configure(case("mistral", sliding_window=...))) == [4096] * 3
    assert windows(configure(case("mistral", sliding_window=None))) == [0] * 3
    assert windows(configure(case("qwen2", sliding_window=8))) == [0] * 3
    on = {"sliding_window": 8, "use_sliding_window": True}
    assert windows(configure(case("qwen2", **on))) == [0] * 3  # from layer 28 on
    assert windows(configure(case("qwen3", **on, max_window_layers=2))) == [0, 0, 8]
    assert windows(configure(case("moe", **on, max_window_layers=2))) == [8, 8, 8]
    assert windows(configure(case("gemma3"))) == [16, 0, 16, 0]
    assert windows(configure(case("gemma3", sliding_window_pattern=...))) == [16] * 4
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert windows(configure(case("gemma3", layer_types=kinds))) == [0, 16, 0, 0]
    assert windows(configure(case("llama", sliding_window=8, use_sliding_window=False))) == [0] * 3


def test_windows_and_scales_are_part_of_the_shape() -> None:
    """They are compiled in: kernel sets are found by the shape's hash."""
    shapes = [
        configure(case("mistral", sliding_window=None)).shape,
        configure(case("mistral", sliding_window=8)).shape,
        configure(case("mistral", sliding_window=9)).shape,
        configure(case("qwen2", tie_word_embeddings=False)).shape,
        configure(case("granite")).shape,
        configure(case("granite", residual_multiplier=0.5)).shape,
        configure(case("granite", logits_scaling=1.0, residual_multiplier=0.7)).shape,
        configure(case("llama", hidden_act="gelu_pytorch_tanh")).shape,
        configure(case("llama")).shape,
        configure(case("llama", attention_bias=True)).shape,
        configure(case("llama", mlp_bias=True)).shape,
        configure(case("llama", rope_scaling=family_models.CASES["llama-yarn"][1]["rope_scaling"])).shape,
        configure(family_models.config("llama-longrope")).shape,
    ]
    assert len({shape.hash() for shape in shapes}) == len(shapes)
    plain = configure(case("mistral", sliding_window=None)).shape
    assert configure({**case("mistral", sliding_window=None), **{"architectures": ["LlamaForCausalLM"]}}).shape == plain


def test_experts() -> None:
    assert [layer.sparse for layer in configure(case("moe")).layers] == [True] * 3
    assert [layer.sparse for layer in configure(case("moe", mlp_only_layers=[1])).layers] == [True, False, True]
    assert [layer.sparse for layer in configure(case("moe", decoder_sparse_step=2)).layers] == [False, True, False]
    assert configure(case("moe", norm_topk_prob=...)).shape.norm_topk_prob is False
    renamed = case("moe", num_experts=..., num_local_experts=6)
    assert configure(renamed) == configure(case("moe"))
    with pytest.raises(CheckpointError, match="num_local_experts is 5, num_experts is 6"):
        configure(case("moe", num_local_experts=5))


def test_gemma_3_files_that_state_next_to_nothing() -> None:
    """As published for 4B: what is left out is what transformers assumes."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {}}
    config = configure({**outer, "text_config": text})
    shape = config.shape
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.vocab_size) == (8, 4, 256, 262208)
    assert (shape.hidden_act, shape.windows, shape.qk_norm, shape.post_norms) == ("gelu_tanh", (0, 1024), True, True)
    assert (shape.attention_scale, shape.embedding_scale) == (0.0, math.sqrt(2560))  # 256 ** -0.5 is the usual scale
    assert config.tied and config.norm_offset == 1.0 and config.max_context == 131072
    assert windows(config)[:7] == [1024] * 5 + [0, 1024]
    full, sliding = (config.ropes[kind].inv_freq[0] for kind in ("full_attention", "sliding_attention"))
    assert full[0] == 1 / 8 and sliding[0] == 1.0
    assert full[1] == pytest.approx(1e6 ** (-2 / 256) / 8) and sliding[1] == pytest.approx(1e4 ** (-2 / 256))


def test_tensors_of_a_multimodal_gemma_are_found_under_either_prefix() -> None:
    config = configure(case("gemma3", architectures=["Gemma3ForConditionalGeneration"]))
    family = FAMILIES["Gemma3ForConditionalGeneration"]
    for prefix in ("model.", "language_model.model.", "model.language_model."):
        sources = family.weights(config, {f"{prefix}embed_tokens.weight"})
        assert sources["embedding.weight"].tensors == (f"{prefix}embed_tokens.weight",)
        assert sources["layers.1.o.weight"].tensors == (f"{prefix}layers.1.self_attn.o_proj.weight",)
        assert sources["layers.1.mlp_norm.weight"].add == 1.0
    assert "vision_tower.encoder.layers.0.mlp.fc1.bias".startswith(family.other_parts)


def test_the_rope_set_follows_from_the_length() -> None:
    config = configure(family_models.config("llama-longrope"))
    assert config.rope_switch == 32
    assert [config.rope_set(length) for length in (1, 32, 33, 256)] == [0, 0, 1, 1]
    short, long = config.ropes["full_attention"].inv_freq
    assert short[1] == pytest.approx(long[1] * 1.9 / 1.02)
    assert config.ropes["full_attention"].scale == pytest.approx(math.sqrt(1 + math.log(8) / math.log(32)))
    never = configure(family_models.config("llama-longrope") | {"original_max_position_embeddings": 256})
    assert never.shape.rope_sets == 1 and never.rope_switch == 0 and never.rope_set(256) == 0


def test_yarn_reaches_beyond_the_trained_length() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert configure(case("qwen2", rope_scaling=yarn)).max_context == 1024
    assert configure(case("qwen2", rope_scaling={"type": "dynamic", "factor": 4.0})).max_context == 256


_WINDOW = {"sliding_window": 8, "use_sliding_window": True}
_LONG = family_models.CASES["phi3-short"][1]["rope_scaling"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        # what another family computes
        *(
            (family, {field: value}, f"{field} is {value!r}")
            for family, field, value in (
                ("llama", "sliding_window", 8),
                ("granite", "sliding_window", 8),
                ("llama", "embedding_multiplier", 12.0),
                ("mistral", "attention_multiplier", 0.1),
                ("qwen3", "residual_multiplier", 0.2),
                ("phi3", "logits_scaling", 8.0),
                ("llama", "query_pre_attn_scalar", 256),
                ("llama", "num_experts", 8),
                ("mistral", "num_local_experts", 8),
                ("moe", "shared_expert_intermediate_size", 64),
                ("gemma3", "final_logit_softcapping", 30.0),
                ("gemma3", "attn_logit_softcapping", 50.0),
                ("gemma3", "use_bidirectional_attention", True),
                ("qwen2", "clip_qkv", 8.0),
                ("llama", "is_causal", False),
            )
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; accepted: 1.0"),
        # contradictions
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}, "use_sliding_window is false"),
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, "layer_types differs"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 3},
            "has sliding_attention but no sliding_window",
        ),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries; accepted: 3 names"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types has 'linear_attention' in layer 0"),
        ("moe", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 exceeds num_experts 6"),
        # absurd
        ("qwen2", {"num_hidden_layers": 1 << 40}, f"num_hidden_layers is {1 << 40}"),
        ("qwen2", {"num_hidden_layers": 1 << 20}, f"num_hidden_layers is {1 << 20}; accepted: at most 1024"),
        ("qwen3", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("gemma3", {"sliding_window": -1}, "sliding_window is -1"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers is -1",
        ),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": "no"}, "use_sliding_window is 'no'"),
        ("granite", {"embedding_multiplier": -1.0}, "embedding_multiplier is -1.0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0.0"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0"),
        ("moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers is ['0']"),
        ("moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ("llama", {"rope_theta": 10**400}, "rope_theta is inf"),
        # RoPE
        ("llama", {"rope_scaling": 3}, "rope_scaling is 3"),
        ("qwen2", {"rope_scaling": {"type": "mrope"}}, "rope_scaling type 'mrope' is not known"),
        ("llama", {"rope_scaling": {"type": ["yarn"]}}, "rope_scaling type ['yarn'] is not known"),
        ("phi3", {"rope_scaling": {**_LONG, "long_factor": [1.0] * 15}}, "long_factor has 15 entries; accepted: 16"),
        ("phi3", {"rope_scaling": {**_LONG, "short_factor": None}}, "rope_scaling has no short_factor"),
        ("phi3", {"rope_scaling": {**_LONG, "short_factor": [0.0] * 16}}, "short_factor is 0.0"),
        ("phi3", {"rope_scaling": {**_LONG, "long_factor": ["a"] * 16}}, "long_factor is 'a'"),
        (
            "phi3",
            {"rope_scaling": {**_LONG, "short_mscale": 1.2}},
            "has short_mscale 1.2, which this",
        ),
        ("llama", {"rope_scaling": {"type": "default", "factor": 4.0}}, "type default has factor 4.0"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "rope_theta is 1.0"),
        ("gemma3", {"rope_parameters": {"full_attention": 3, "sliding_attention": {}}}, "full_attention is 3"),
        ("qwen3", {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "has no full_attention"),
    ],
)
def test_what_is_not_applied_is_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    configure(case(family))
    with pytest.raises(CheckpointError) as caught:
        configure(case(family, **changes))
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_scaling": {"rope_type": "default"}}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 1.0, "finetuned": True}}),
        ("llama", {"embedding_multiplier": 1.0, "logit_scale": 1, "num_experts": 0, "no_rope_layers": []}),
        ("llama", {"sliding_window": None, "attention_bias": None, "mlp_bias": None, "rope_parameters": None}),
        ("llama", {"layer_types": ["full_attention"] * 3}),
        ("mistral", {"layer_types": ["full_attention"] * 3}),
        ("gemma3", {"final_logit_softcapping": None, "use_bidirectional_attention": False}),
    ],
)
def test_a_value_that_changes_nothing_is_accepted(family: str, changes: dict[str, Any]) -> None:
    found, plain = configure(case(family, **changes)), configure(case(family))
    assert found == plain


ABSURD: list[Any] = [0, -1, 7, 1 << 40, 1 << 70, 1.5, float("nan"), float("inf"), None, "8", True, [], ["a"], {"a": 1}]

_SCHEMES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "attention_factor": None, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 1.0},
    "longrope": {"factor": None, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
}


@pytest.mark.parametrize("family", sorted(PLAIN))
def test_an_absurd_value_is_an_error_of_ours_or_none(family: str) -> None:
    """Every field of every family, and of every scheme: nothing but a CheckpointError, at once."""
    config = case(family)
    fields = {*config, "layer_types", "mlp_only_layers", "rope_scaling", "rope_parameters", "text_config", "qkv_bias"}
    fields |= {"use_sliding_window", "max_window_layers", "partial_rotary_factor", "attention_bias", "num_experts"}
    tried = [{**config, field: value} for field in sorted(fields) for value in ABSURD]
    for scheme, stated in _SCHEMES.items():
        rope = {"rope_type": scheme, "rope_theta": 1e4, **stated}
        tried += [{**config, "rope_scaling": {**rope, field: value}} for field in rope for value in ABSURD]
    refused = 0
    for each in tried:
        try:
            configure(each)
        except CheckpointError:
            refused += 1
    assert len(tried) / 2 < refused < len(tried)
