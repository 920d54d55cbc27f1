"""Tiny random Llama checkpoints, for tests that need a model but not language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights by Hugging Face name, scaled so that activations stay of order 1.

    From NumPy's legacy generator, whose stream is frozen: an oracle file may rely on it.
    """
    rng = np.random.RandomState(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm() -> np.ndarray[Any, Any]:
        return (1.0 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    result = {
        "model.embed_tokens.weight": rng.standard_normal((vocab, hidden)).astype(np.float32),
        "model.norm.weight": norm(),
    }
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = 3.0 * matrix(vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        result |= {
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.self_attn.q_proj.weight": matrix(q, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, q),
            f"{layer}.post_attention_layernorm.weight": norm(),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return result


def write(folder: Path, seed: int = 0, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write a checkpoint; `changes` go into config.json, tensors named in `drop` are left out."""
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: array for name, array in tensors(config, seed).items() if name not in drop}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drop_field(folder: Path, field: str) -> None:
    """Remove a field from a checkpoint's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config[field]
    path.write_text(json.dumps(config))
