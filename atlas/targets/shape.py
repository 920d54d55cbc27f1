"""The shape: the constants of a model, on one shard, that kernels are compiled for.

One function derives it from `config.json` (or the public facts in `kernels/models/<model>.json`,
which use the same field names) and a shard. Build and load both call it, so they cannot disagree.
Kernel sets are keyed by the shape's hash, never by a model's name: any fine-tune matches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError

KV_BLOCK_SIZE = 16
"""Tokens in one KV block (formats.md)."""

_MAX_DIMENSION = 1 << 24

_MAX_HEAD_DIM = 1024
"""Kernels keep a head in registers, and published models end at 576; a wild value keeps a compiler busy for ever."""

_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_QK_NORM_AND_GATE = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Architectures whose attention differs in a way that their config.json leaves to the model's code."""


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

    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the sorted fields: the key of kernel sets."""
        stated = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]


def config_field(config: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """One field of config.json, checked. A null counts as absent.

    Raises:
        CheckpointError: absent without a default, of another type, or out of any sane range.
    """
    value = config.get(name)
    if value is None:
        if default is None:
            raise CheckpointError("config.json", f"required field {name!r} is missing", kind.__name__)
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise CheckpointError("config.json", f"{name} is {value!r}", f"a value of type {kind.__name__}")
    if isinstance(value, float) and not 0.0 < value < math.inf:
        raise CheckpointError("config.json", f"{name} is {value}", "a finite number above 0")
    if isinstance(value, int) and kind is int and not 0 < value <= _MAX_DIMENSION:
        raise CheckpointError("config.json", f"{name} is {value}", f"an integer in 1..{_MAX_DIMENSION}")
    return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's fields: `config` itself, or its `text_config` where a multimodal model nests them.

    `architectures` stays the outer one, which names the family; what the nested part leaves out or sets
    to null (`tie_word_embeddings`) comes from outside.
    """
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise CheckpointError("config.json", f"text_config is {nested!r}", "an object")
    merged = {key: value for key, value in config.items() if key != "text_config"}
    merged |= {key: value for key, value in nested.items() if value is not None}
    return merged | {"architectures": config.get("architectures") or nested.get("architectures")}


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
    hidden_act = config_field(config, "hidden_act", str, "silu")
    if hidden_act != "silu":
        raise CheckpointError("config.json", f"hidden_act is {hidden_act!r}", "'silu'")
    if not 0 <= shard.tp_rank < shard.tp_size:
        raise CheckpointError("shard", f"tp_rank {shard.tp_rank} of tp_size {shard.tp_size}", "0 <= tp_rank < tp_size")
    architecture = (config.get("architectures") or [""])[0]
    return Shape(
        hidden_size=hidden_size,
        intermediate_size=_dense_intermediate_size(config, shard),
        n_heads=_part("num_attention_heads", n_heads, shard),
        n_kv_heads=_part("num_key_value_heads", n_kv_heads, shard),
        head_dim=head_dim,
        vocab_size=_part("vocab_size", config_field(config, "vocab_size", int), shard),
        # GGUF stores 1e-5 as the nearest fp32, JSON as the nearest fp64: one shape, one hash.
        rms_norm_eps=float(f"{config_field(config, 'rms_norm_eps', float, 1e-6):.6g}"),
        hidden_act=hidden_act,
        qk_norm=architecture in _QK_NORM + _QK_NORM_AND_GATE,
        attention_gate=config_field(config, "attn_output_gate", bool, architecture in _QK_NORM_AND_GATE),
        rotary_dim=_rotary_dim(config, head_dim),
        **_experts(config, shard),
        **_linear_attention(config, shard),
    )


def _part(name: str, value: int, shard: Shard) -> int:
    """What one tensor-parallel rank holds of `value`."""
    if value % shard.tp_size:
        raise CheckpointError("shard", f"tp_size {shard.tp_size} does not divide {name} {value}")
    return value // shard.tp_size


def _multiple(name: str, value: int, of_name: str, of: int) -> None:
    if value % of:
        raise CheckpointError("config.json", f"{name} {value} is no multiple of {of_name} {of}")


def _has_experts(config: Mapping[str, Any]) -> bool:
    # Dense models of a MoE family state 0 or null.
    return config.get("num_experts") not in (None, 0)


def _dense_intermediate_size(config: Mapping[str, Any], shard: Shard) -> int:
    """0 if every layer has experts: a value that stands there all the same belongs to no layer."""
    step = config_field(config, "decoder_sparse_step", int, 1)
    if _has_experts(config) and step == 1 and not config.get("mlp_only_layers"):
        return 0
    return _part("intermediate_size", config_field(config, "intermediate_size", int), shard)


def _experts(config: Mapping[str, Any], shard: Shard) -> dict[str, int]:
    begin, end = shard.expert_begin, shard.expert_end
    if not _has_experts(config):
        if begin or end is not None:
            raise CheckpointError("shard", f"experts {begin}..{end} of a model without experts", "no expert range")
        return {}
    total = config_field(config, "num_experts", int)
    last = total if end is None else end
    if not 0 <= begin < last <= total:
        raise CheckpointError("shard", f"experts {begin}..{last} of {total}", f"0 <= begin < end <= {total}")
    per_token = config_field(config, "num_experts_per_tok", int)
    if per_token > total:
        raise CheckpointError("config.json", f"num_experts_per_tok {per_token} exceeds num_experts {total}")
    found = {
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
    return found


def _linear_attention(config: Mapping[str, Any], shard: Shard) -> dict[str, int]:
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


def _rotary_dim(config: Mapping[str, Any], head_dim: int) -> int:
    """Elements of a head that RoPE turns, 0 for all. Newer files state the factor in `rope_parameters`."""
    rope = config.get("rope_parameters")
    source = rope if isinstance(rope, Mapping) and rope.get("partial_rotary_factor") is not None else config
    factor = config_field(source, "partial_rotary_factor", float, 1.0)
    turned = round(head_dim * factor)
    if not 0.0 < factor <= 1.0 or turned != head_dim * factor or (factor < 1.0 and turned % 2):
        raise CheckpointError(
            "config.json",
            f"partial_rotary_factor is {factor} of head_dim {head_dim}",
            "a fraction in (0, 1] that gives an even number of elements",
        )
    return 0 if turned == head_dim else turned
