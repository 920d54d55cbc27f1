"""What llama.cpp's converter makes of Hugging Face's tensors: names, and the order of rows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER_NAMES = _ATTENTION_NAMES | {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_LAYER_TENSOR = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What llama.cpp's converter makes of one architecture.

    hugging_face, model_type: its names in config.json.
    names: stem of a layer's tensor -> Hugging Face's, with {} for the number of an expert.
    fields: metadata read beside what every architecture has.
    permuted: rows of q and k lie as llama.cpp's original rotation wants them (see unpermute_rows).
    norm_offset: what norm weights have gained: Gemma's are stored as 1 + w.
    """

    hugging_face: str
    model_type: str
    names: Mapping[str, str]
    fields: frozenset[str] = frozenset()
    permuted: bool = False
    norm_offset: float = 0.0


_WINDOW = frozenset({"attention.sliding_window"})

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", _LAYER_NAMES, _WINDOW, permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _LAYER_NAMES),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _LAYER_NAMES | _QK_NORM_NAMES),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _LAYER_NAMES | _QK_NORM_NAMES | _EXPERT_NAMES | {"ffn_gate_inp": "mlp.gate"},
        frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_norm"}),
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _LAYER_NAMES
        | _QK_NORM_NAMES
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _WINDOW | {"attention.sliding_window_pattern", "rope.freq_base_swa", "attention.scale"},
        norm_offset=1.0,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        _ATTENTION_NAMES
        | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        _WINDOW,
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        "granite",
        _LAYER_NAMES,
        frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
        permuted=True,
    ),
}
"""By general.architecture."""

ROPE_FACTORS = {
    "rope_freqs.weight": "factors",
    "rope_factors_short.weight": "short_factor",
    "rope_factors_long.weight": "long_factor",
}
"""Tensors that hold divisors of RoPE frequencies, which belong to the configuration (see add_rope_factors)."""


def hf_names(architecture: str, name: str, count: int) -> tuple[str, ...]:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``.

    A tensor of stacked experts gives one name for each of its `count` first indices; a tensor that the
    architecture does not know gives none.
    """
    names = ARCHITECTURES[architecture].names
    if match := _LAYER_TENSOR.match(name):
        layer, stem, kind = match.groups()
        if stem not in names:
            return ()
        full = f"model.layers.{int(layer)}.{names[stem]}.{kind}"
        return tuple(full.format(expert) for expert in range(count)) if "{}" in full else (full,)
    stem, _, kind = name.rpartition(".")
    return (f"{_GLOBAL_NAMES[stem]}.{kind}",) if stem in _GLOBAL_NAMES and kind in ("weight", "bias") else ()


def unpermute_rows(array: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of a q or k projection from GGUF's order back to Hugging Face's.

    llama.cpp rotates neighbouring pairs, Hugging Face a head's first half against its second, so the
    converter interleaved the halves of each head. array: [heads * head_dim, ...].
    """
    rows = array.shape[0]
    split = array.reshape(heads, rows // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)
