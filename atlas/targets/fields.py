"""config.json, field by field: checked reading, and the values of fields that a family's files leave out.

The spelling is Hugging Face's, for the public facts in `kernels/models/` too. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError

_MAX_DIMENSION = 1 << 24
_NUMBERS = 1e-30, 1e30
"""The least and the largest number a model may state: products of several stay finite."""

_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}
"""Published Gemma-3 files state little more than what differs from the 2B model that never was."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    "Qwen3MoeForCausalLM": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "Phi3ForCausalLM": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}
"""What transformers' configuration classes (5.24) assume for an absent field, where it is not the general default."""

_BY_MODEL_TYPE = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""What `architectures` is where a file leaves it out: model_type tells, as it does transformers."""

_RENAMED = {"Qwen3MoeForCausalLM": {"num_local_experts": "num_experts"}}
"""Other names under which transformers 5 saves a family's fields."""

_NULL_SAYS_NONE = ("sliding_window", "num_key_value_heads", "num_experts")
"""Fields whose null is a value of its own (no window, as many as heads) and not the family's default."""


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
        value = float(value) if abs(value) <= _NUMBERS[1] else math.inf
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise CheckpointError("config.json", f"{name} is {value!r}", f"a value of type {kind.__name__}")
    if isinstance(value, float) and not _NUMBERS[0] <= value <= _NUMBERS[1]:
        raise CheckpointError("config.json", f"{name} is {value}", f"a number in {_NUMBERS[0]}..{_NUMBERS[1]}")
    if isinstance(value, int) and kind is int and not 0 < value <= _MAX_DIMENSION:
        raise CheckpointError("config.json", f"{name} is {value}", f"an integer in 1..{_MAX_DIMENSION}")
    return value


def architecture(config: Mapping[str, Any]) -> str:
    """The first of `architectures`; "" where there is none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's fields: `config`, or its `text_config` where a multimodal model nests them, and the
    family's defaults for what is absent.

    `architectures` stays the outer one, which names the family; what the nested part leaves out or sets
    to null (`tie_word_embeddings`) comes from outside.
    """
    nested = config.get("text_config")
    merged = config
    if nested is not None:
        if not isinstance(nested, Mapping):
            raise CheckpointError("config.json", f"text_config is {nested!r}", "an object")
        outer = {key: value for key, value in config.items() if key != "text_config"}
        merged = outer | {key: value for key, value in nested.items() if value is not None or key not in outer}
        merged |= {"architectures": config.get("architectures") or nested.get("architectures")}
    implied = _BY_MODEL_TYPE.get(str(config.get("model_type")))
    if implied and merged.get("architectures") in (None, []):
        merged = {**merged, "architectures": [implied]}
    for other, name in _RENAMED.get(architecture(merged), {}).items():
        if merged.get(other) is not None:
            if merged.get(name) not in (None, merged[other]):
                raise CheckpointError("config.json", f"{other} is {merged[other]!r}, {name} is {merged[name]!r}", "one")
            merged = {**{key: value for key, value in merged.items() if key != other}, name: merged[other]}
    defaults = _DEFAULTS.get(architecture(merged), {})
    absent = {
        name: value
        for name, value in defaults.items()
        if name not in merged or (merged[name] is None and name not in _NULL_SAYS_NONE)
    }
    return {**merged, **absent} if absent else merged
