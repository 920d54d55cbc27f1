"""The shape: the constants of a model, on one shard, that kernels are compiled for.

One function derives it from `config.json` (or the public facts in `kernels/models/<model>.json`,
which use the same field names) and a shard. Build and load both call it, so they cannot disagree.
Kernel sets are keyed by the shape's hash, never by a model's name: any fine-tune matches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError
from atlas.targets.fields import architecture, config_field, text_config
from atlas.targets.layers import has_experts, layers
from atlas.targets.rope import rope, rotary_dim

KV_BLOCK_SIZE = 16
"""Tokens in one KV block."""

_MAX_HEAD_DIM = 1024
"""Kernels keep a head in registers, and published models end at 576; a wild value keeps a compiler busy for ever."""

_MAX_EXPERTS = 1 << 17
"""In all layers together: five times the largest published model's; each is three tensors to name and look for."""

_GRANITE = ("GraniteForCausalLM",)
_GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *_GEMMA3)
_QK_NORM_AND_GATE = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
_QKV_BIAS = ("Qwen2ForCausalLM",)
"""Architectures whose attention differs in a way that their config.json leaves to the model's code."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
"""config.json's name of the MLP's activation -> Shape.hidden_act: silu, gelu_tanh (the approximation) or gelu (erf)."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which part of a model one device holds.

    tp_rank, tp_size: tensor-parallel rank and group size.
    expert_begin, expert_end: range of experts held; None means all of them.
    """

    tp_rank: int = 0
    tp_size: int = 1
    expert_begin: int = 0
    expert_end: int | None = None


@dataclasses.dataclass(frozen=True)
class Shape:
    """Per-shard constants. Field names are the names that op constants are derived from.

    intermediate_size: of the dense MLP; 0 where every layer has experts instead.

    Fields with a default are what only some architectures have; a field that keeps its default is left
    out of the hash, so that a new one does not orphan the kernels of models that lack it.

    qk_norm: queries and keys pass an RMS norm before RoPE.
    attention_gate: the query projection also yields a gate for the attention's output.
    rotary_dim: leading elements of a head that RoPE turns; 0 means all of head_dim.
    n_experts: routed experts of the model, the router's width.  n_local_experts: those on this shard.
    shared_expert_size: intermediate size of the expert that every token passes.
    linear_*, n_linear_*, conv_kernel: gated delta net layers.
    norm_topk_prob: the weights of a token's experts are scaled to sum to 1.
    qkv_bias, o_bias, mlp_bias: which linears add a bias.
    post_norms: attention's and the MLP's outputs pass an RMS norm of their own before they are added.
    windows: sizes of attention window that occur, ascending, 0 for layers that see everything; empty means only those.
    attention_scale: of the scores; 0 means head_dim ** -0.5.
    embedding_scale, residual_scale: of token embeddings, and of what each block adds to the residual stream.
    rope_sets: frequency lists between which a sequence's length chooses.
    rope_scales: of cos and sin, those that occur, ascending; empty means 1.
    """

    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    qk_norm: bool = False
    attention_gate: bool = False
    rotary_dim: int = 0
    n_experts: int = 0
    n_local_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_expert_size: int = 0
    n_linear_key_heads: int = 0
    n_linear_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    conv_kernel: int = 0
    norm_topk_prob: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    post_norms: bool = False
    windows: tuple[int, ...] = ()
    attention_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    rope_sets: int = 1
    rope_scales: tuple[float, ...] = ()

    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the sorted fields: the key of kernel sets."""
        stated = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]


def shape(config: Mapping[str, Any], shard: Shard = Shard()) -> Shape:
    """The shape of `config` (Hugging Face spelling) on `shard`.

    Raises:
        CheckpointError: a field is missing or absurd, or fields contradict each other or the shard.
    """
    config = text_config(config)
    n_heads = config_field(config, "num_attention_heads", int)
    n_kv_heads = config_field(config, "num_key_value_heads", int, n_heads)
    hidden_size = config_field(config, "hidden_size", int)
    _multiple("num_attention_heads", n_heads, "num_key_value_heads", n_kv_heads)
    if config.get("head_dim") is None and hidden_size % n_heads:
        raise CheckpointError(
            "config.json",
            f"hidden_size {hidden_size} is no multiple of num_attention_heads {n_heads}",
            "an explicit head_dim, or a hidden_size that divides",
        )
    head_dim = config_field(config, "head_dim", int, hidden_size // n_heads)
    if head_dim > _MAX_HEAD_DIM:
        raise CheckpointError("config.json", f"head_dim is {head_dim}", f"at most {_MAX_HEAD_DIM}")
    if not 0 <= shard.tp_rank < shard.tp_size:
        raise CheckpointError("shard", f"tp_rank {shard.tp_rank} of tp_size {shard.tp_size}", "0 <= tp_rank < tp_size")
    family = architecture(config)
    return Shape(
        hidden_size=hidden_size,
        intermediate_size=_dense_intermediate_size(config, shard),
        n_heads=_part("num_attention_heads", n_heads, shard),
        n_kv_heads=_part("num_key_value_heads", n_kv_heads, shard),
        head_dim=head_dim,
        vocab_size=_part("vocab_size", config_field(config, "vocab_size", int), shard),
        # GGUF stores 1e-5 as the nearest fp32, JSON as the nearest fp64: one shape, one hash.
        rms_norm_eps=float(f"{config_field(config, 'rms_norm_eps', float, 1e-6):.6g}"),
        hidden_act=_activation(config),
        qk_norm=family in _QK_NORM + _QK_NORM_AND_GATE,
        attention_gate=config_field(config, "attn_output_gate", bool, family in _QK_NORM_AND_GATE),
        post_norms=family in _GEMMA3,
        **_experts(config, shard),
        **_linear_attention(config, shard),
        **_biases(config),
        **_scales(config, hidden_size, head_dim),
        **_positions(config, head_dim),
    )


def _activation(config: Mapping[str, Any]) -> str:
    """Gemma-3 calls the field hidden_activation, because files of its forerunners had a wrong hidden_act."""
    name = "hidden_activation" if architecture(config) in _GEMMA3 else "hidden_act"
    stated = config_field(config, name, str, "silu")
    if stated not in ACTIVATIONS:
        raise CheckpointError("config.json", f"{name} is {stated!r}", ", ".join(ACTIVATIONS))
    return ACTIVATIONS[stated]


def _biases(config: Mapping[str, Any]) -> dict[str, Any]:
    """`attention_bias` covers q, k, v and the output; `qkv_bias` all but the output."""
    whole = config_field(config, "attention_bias", bool, False)
    if architecture(config) in _QKV_BIAS:
        return {"qkv_bias": True, "mlp_bias": config_field(config, "mlp_bias", bool, False)}
    return {
        "qkv_bias": whole or config_field(config, "qkv_bias", bool, False),
        "o_bias": whole,
        "mlp_bias": config_field(config, "mlp_bias", bool, False),
    }


def _scales(config: Mapping[str, Any], hidden_size: int, head_dim: int) -> dict[str, Any]:
    """Gemma scales embeddings by the root of their size; Granite states every factor."""
    if architecture(config) in _GEMMA3:
        scale = config_field(config, "query_pre_attn_scalar", float) ** -0.5
        found = {"attention_scale": scale, "embedding_scale": hidden_size**0.5}
    elif architecture(config) in _GRANITE:
        found = {
            "attention_scale": config_field(config, "attention_multiplier", float, 1.0),
            "embedding_scale": config_field(config, "embedding_multiplier", float, 1.0),
            "residual_scale": config_field(config, "residual_multiplier", float, 1.0),
        }
    else:
        return {}
    return found | ({"attention_scale": 0.0} if found["attention_scale"] == head_dim**-0.5 else {})


def _positions(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Windows and RoPE of the kinds of layer that there are. Kinds without positions (a delta net) have none."""
    found = {layer.kind: layer.window for layer in layers(config)}
    turned = {rotary_dim(config, head_dim, kind) for kind in found}
    if len(turned) > 1:
        raise CheckpointError(
            "config.json", f"layers turn {sorted(turned)} elements of a head", "one partial_rotary_factor for all"
        )
    ropes = [rope(config, head_dim, kind) for kind in found]
    windows, scales = sorted(set(found.values())), sorted({each.scale for each in ropes})
    return {
        "rotary_dim": 0 if turned == {head_dim} else turned.pop(),
        "windows": () if windows == [0] else tuple(windows),
        "rope_sets": max(len(each.inv_freq) for each in ropes),
        "rope_scales": () if scales == [1.0] else tuple(scales),
    }


def _part(name: str, value: int, shard: Shard) -> int:
    """What one tensor-parallel rank holds of `value`."""
    if value % shard.tp_size:
        raise CheckpointError("shard", f"tp_size {shard.tp_size} does not divide {name} {value}")
    return value // shard.tp_size


def _multiple(name: str, value: int, of_name: str, of: int) -> None:
    if value % of:
        raise CheckpointError("config.json", f"{name} {value} is no multiple of {of_name} {of}")


def _dense_intermediate_size(config: Mapping[str, Any], shard: Shard) -> int:
    """0 if every layer has experts: a value that stands there all the same belongs to no layer."""
    if all(layer.sparse for layer in layers(config)):
        return 0
    return _part("intermediate_size", config_field(config, "intermediate_size", int), shard)


def _experts(config: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    begin, end = shard.expert_begin, shard.expert_end
    if not has_experts(config):
        if begin or end is not None:
            raise CheckpointError("shard", f"experts {begin}..{end} of a model without experts", "no expert range")
        return {}
    total = config_field(config, "num_experts", int)
    sparse = sum(layer.sparse for layer in layers(config))
    if total * sparse > _MAX_EXPERTS:
        raise CheckpointError(
            "config.json", f"num_experts is {total} in {sparse} layers", f"at most {_MAX_EXPERTS} experts in all"
        )
    last = total if end is None else end
    if not 0 <= begin < last <= total:
        raise CheckpointError("shard", f"experts {begin}..{last} of {total}", f"0 <= begin < end <= {total}")
    per_token = config_field(config, "num_experts_per_tok", int)
    if per_token > total:
        raise CheckpointError("config.json", f"num_experts_per_tok {per_token} exceeds num_experts {total}")
    found: dict[str, Any] = {
        "n_experts": total,
        "n_local_experts": last - begin,
        "experts_per_token": per_token,
        "moe_intermediate_size": _part(
            "moe_intermediate_size", config_field(config, "moe_intermediate_size", int), shard
        ),
    }
    if config.get("shared_expert_intermediate_size") not in (None, 0):
        name = "shared_expert_intermediate_size"
        found["shared_expert_size"] = _part(name, config_field(config, name, int), shard)
    found["norm_topk_prob"] = config_field(config, "norm_topk_prob", bool, False)
    return found


def _linear_attention(config: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    kinds = config.get("layer_types")
    if config.get("linear_num_value_heads") is None or (kinds is not None and "linear_attention" not in kinds):
        return {}
    keys, values = (config_field(config, f"linear_num_{kind}_heads", int) for kind in ("key", "value"))
    _multiple("linear_num_value_heads", values, "linear_num_key_heads", keys)
    return {
        "n_linear_key_heads": _part("linear_num_key_heads", keys, shard),
        "n_linear_value_heads": _part("linear_num_value_heads", values, shard),
        "linear_key_head_dim": config_field(config, "linear_key_head_dim", int),
        "linear_value_head_dim": config_field(config, "linear_value_head_dim", int),
        "conv_kernel": config_field(config, "linear_conv_kernel_dim", int),
    }
