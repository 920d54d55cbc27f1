"""Small Llama GGUF files, written by `gguf.GGUFWriter`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 4, 2, 64, 512, 40

ROUND_TRIP = (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)
K_QUANTS = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K)


def converter_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row order in GGUF, written out row by row: rotated pairs (i, i + half) become neighbours."""
    head_dim = weight.shape[0] // heads
    half = head_dim // 2
    order = [h * head_dim + part * half + i for h in range(heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def hf_weights() -> dict[str, np.ndarray]:
    """GGUF stem -> float32 weight in Hugging Face row order."""
    rng = np.random.default_rng(3)
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}

FIELDS: dict[str, Callable[[gguf.GGUFWriter], None]] = {
    "context_length": lambda w: w.add_context_length(128),
    "embedding_length": lambda w: w.add_embedding_length(HIDDEN),
    "block_count": lambda w: w.add_block_count(1),
    "feed_forward_length": lambda w: w.add_feed_forward_length(FFN),
    "attention.head_count": lambda w: w.add_head_count(HEADS),
    "attention.head_count_kv": lambda w: w.add_head_count_kv(KV_HEADS),
    "attention.layer_norm_rms_epsilon": lambda w: w.add_layer_norm_rms_eps(1e-5),
    "rope.freq_base": lambda w: w.add_rope_freq_base(50000.0),
    "rope.dimension_count": lambda w: w.add_rope_dimension_count(HEAD_DIM),
}
TOKENS = ["<s>", "</s>", *(chr(ord("a") + index) for index in range(26)), "ab", "Ġ"]


def write(
    path: Path,
    *,
    without: tuple[str, ...] = (),
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: dict[str, tuple[np.ndarray, Q | None]] | None = None,
    architecture: str = "llama",
    split: int = 0,
    pre: str | None = "gpt-2",
) -> Path:
    """A small Llama GGUF. tensors: full GGUF name -> (array as stored, type); by default float32 weights."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for name, add in FIELDS.items():
        if name not in without:
            add(writer)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ bos_token }}")
    extra(writer)
    if tensors is None:
        tensors = {f"{stem}.weight": (stored(stem, weight), None) for stem, weight in hf_weights().items()}
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(stem: str, weight: np.ndarray) -> np.ndarray:
    """A weight as the converter stores it."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stem.rpartition(".")[2])
    return converter_permute(weight, heads) if heads else weight


def with_types(types: tuple[Q, ...]) -> dict[str, tuple[np.ndarray, Q | None]]:
    """The default weights, matrices quantised to `types` in turn."""
    result: dict[str, tuple[np.ndarray, Q | None]] = {}
    for index, (stem, weight) in enumerate(hf_weights().items()):
        kind = Q.F32 if weight.ndim == 1 else types[index % len(types)]
        array = stored(stem, weight)
        if kind in K_QUANTS:  # The package cannot quantise these, and any bytes are valid blocks.
            block, size = gguf.GGML_QUANT_SIZES[kind]
            blocks = np.random.default_rng(index).integers(0, 256, (*array.shape[:-1], array.shape[-1] // block * size))
            raw = blocks.astype(np.uint8)
            raw[(raw & 0x7C) == 0x7C] ^= 0x40  # keeps the float16 scales finite
            result[f"{stem}.weight"] = raw, kind
        else:
            result[f"{stem}.weight"] = gguf.quants.quantize(array, kind), kind
    return result
