"""Tiny random checkpoints of every family and option, written without any model library.

Weights come from NumPy's legacy generator, whose stream is frozen: tests/oracle/families.npz relies on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray[Any, Any]

VOCAB = 320

BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        "hidden_act": None,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.6,
        "logits_scaling": 3.0,
    },
}


def _longrope(original: int, size: int = 16) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": original,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.02 * i for i in range(size)],
            "long_factor": [1.0 + 0.9 * i for i in range(size)],
        },
    }


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu", "num_key_value_heads": 1}),
    "llama-dynamic": ("llama", {"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_scaling": _YARN}),
    "llama-yarn-options": (
        "llama",
        {"rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 16, "beta_slow": 2}},
    ),
    "llama-longrope": ("llama", _longrope(32)),
    "llama-proportional": (
        "llama",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "mistral-full": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-off": ("qwen2", {"sliding_window": 8, "max_window_layers": 0}),
    "qwen2-upper-window": ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "sliding_window": 20,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "moe": ("moe", {"norm_topk_prob": True}),
    "moe-dense-layer": ("moe", {"mlp_only_layers": [0]}),
    "moe-step-window": ("moe", {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 24}),
    "gemma3": ("gemma3", {}),
    "gemma3-scaled": (
        "gemma3",
        {
            "query_pre_attn_scalar": 32,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 50000.0,
            "rope_local_base_freq": 500.0,
            "sliding_window_pattern": 3,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3-window": ("phi3", {"sliding_window": 12}),
    "phi3-short": ("phi3", _longrope(128)),
    "phi3-long": ("phi3", {**_longrope(64, 12), "partial_rotary_factor": 0.75}),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
}
"""Name -> family and what is changed of its config.json. Windows and original lengths are below the 100 tokens
that tests run; where one is above, that is the point."""


def config(name: str) -> dict[str, Any]:
    """The case's config.json."""
    family, changes = CASES[name]
    return {**BASE, **FAMILIES[family], **changes}


def tensors(config: dict[str, Any], seed: int) -> dict[str, Array]:
    """Random weights by Hugging Face name, scaled so that activations stay of order 1 and attention is sharp."""
    rng = np.random.RandomState(seed)
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    result: dict[str, Array] = {}

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0, bias: bool = False) -> None:
        result[f"{name}.weight"] = (scale * columns**-0.5 * rng.standard_normal((rows, columns))).astype(np.float32)
        if bias:
            result[f"{name}.bias"] = (0.5 * rng.standard_normal(rows)).astype(np.float32)

    def norm(name: str, size: int = hidden) -> None:
        mean = 0.0 if kind == "gemma3_text" else 1.0
        result[f"{name}.weight"] = (mean + 0.2 * rng.standard_normal(size)).astype(np.float32)

    def mlp(name: str, inner: int) -> None:
        bias = config.get("mlp_bias", False)
        if kind == "phi3":
            matrix(f"{name}.gate_up_proj", 2 * inner, hidden)
        else:
            matrix(f"{name}.gate_proj", inner, hidden, bias=bias)
            matrix(f"{name}.up_proj", inner, hidden, bias=bias)
        matrix(f"{name}.down_proj", hidden, inner, bias=bias)

    matrix("model.embed_tokens", VOCAB, hidden)
    if kind not in ("gemma3_text", "granite"):  # these scale it themselves
        result["model.embed_tokens.weight"] *= np.float32(hidden**0.5)
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        matrix("lm_head", VOCAB, hidden, 3.0)
    for i in range(config["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        bias = config.get("attention_bias", False)
        norm(f"{layer}.input_layernorm")
        norm(f"{layer}.post_attention_layernorm")
        if kind == "phi3":
            matrix(f"{attention}.qkv_proj", q + 2 * kv, hidden, 1.5)
        else:
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                matrix(f"{attention}.{part}_proj", rows, hidden, 1.5, bias or kind == "qwen2")
        matrix(f"{attention}.o_proj", hidden, q, bias=bias)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            norm(f"{attention}.q_norm", head_dim)
            norm(f"{attention}.k_norm", head_dim)
        if kind == "gemma3_text":
            norm(f"{layer}.pre_feedforward_layernorm")
            norm(f"{layer}.post_feedforward_layernorm")
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
        if kind == "qwen3_moe" and i not in dense and (i + 1) % step == 0:
            matrix(f"{layer}.mlp.gate", config["num_experts"], hidden, 2.0)
            for expert in range(config["num_experts"]):
                mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
        else:
            mlp(f"{layer}.mlp", config["intermediate_size"])
    return result


def write(folder: Path, name: str, seed: int = 0) -> Path:
    """A checkpoint of the case."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = config(name)
    (folder / "config.json").write_text(json.dumps(stated))
    save_file(tensors(stated, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
