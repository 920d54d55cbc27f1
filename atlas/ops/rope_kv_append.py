"""rope_kv_append: norm and rotate q and k (RoPE, arXiv 2104.09864), append k and v to the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.ops.lazy import np
from atlas.ops.op import BF16, FLOAT, Arrays, Constants, Op, Operand, Tolerance
from atlas.targets.shape import KV_BLOCK_SIZE


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """q_out = rope(norm(q)); cache[block_table[seq, position // 16], head, position % 16] = rope(norm(k)), v.

    A row of `qkv` is [q heads | k heads | v heads]. With `q_norm` or `k_norm`, each head of q or k is
    first divided by sqrt(mean(head^2) + eps) and multiplied by the norm's weights. The rotation turns
    the leading `rotary_dim` elements of a head: it pairs element i with i + rotary_dim / 2 by the angle
    position * inv_freq[seq_rope[seq], i], computed in fp32, whose cosine and sine are multiplied by
    `rope_scale`. The elements after them stay as they are.
    """
    rows = dims["rows"]
    append(arrays, arrays["qkv"][:rows].astype(np.float32), *turns_and_places(arrays, rows, constants), constants)


def turns_and_places(arrays: Arrays, rows: int, constants: Constants) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Cosines and sines [rows, rotary_dim / 2] of rows, and their blocks and slots there."""
    position, sequence = arrays["row_position"][:rows].astype(np.int64), arrays["row_seq"][:rows]
    angle = position.astype(np.float32)[:, None] * arrays["inv_freq"][arrays["seq_rope"][sequence]]
    scale = np.float32(constants["rope_scale"])
    block = arrays["block_table"][sequence, position // KV_BLOCK_SIZE]
    return (np.cos(angle) * scale, np.sin(angle) * scale), (block, position % KV_BLOCK_SIZE)


def append(arrays: Arrays, qkv: Any, turn: tuple[Any, Any], place: tuple[Any, Any], constants: Constants) -> None:
    """Norms and turns rows of qkv (fp32), writes q_out and the caches. turn, place: of each row, as
    `turns_and_places` gives them."""
    rows, n_heads = len(qkv), int(constants["n_heads"])
    n_kv_heads, head_dim = int(constants["n_kv_heads"]), int(constants["head_dim"])
    rotary_dim = int(constants["rotary_dim"])
    cos, sin = (each[:, None, :] for each in turn)
    q, k, v = np.split(qkv.reshape(rows, n_heads + 2 * n_kv_heads, head_dim), (n_heads, n_heads + n_kv_heads), axis=1)

    def turned(heads: Any, norm: str) -> Any:
        if norm in arrays:
            mean = np.mean(heads * heads, axis=-1, keepdims=True)
            heads = heads / np.sqrt(mean + np.float32(constants["eps"])) * arrays[norm]
        first, second, rest = np.split(heads, (rotary_dim // 2, rotary_dim), axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    q_out, k_cache, v_cache = arrays["q_out"], arrays["k_cache"], arrays["v_cache"]
    q_out[:rows] = turned(q, "q_norm").reshape(rows, -1).astype(q_out.dtype)
    block, slot = place
    k_cache[block, :, slot] = turned(k, "k_norm").astype(k_cache.dtype)
    v_cache[block, :, slot] = v.astype(v_cache.dtype)


_CACHE = ("blocks", "n_kv_heads", KV_BLOCK_SIZE, "head_dim")

ROPE_KV_APPEND = Op(
    name="rope_kv_append",
    operands=(
        Operand("qkv", ("rows", "(n_heads + 2 * n_kv_heads) * head_dim"), FLOAT),
        Operand("q_norm", ("head_dim",), ("f32",), optional=True),
        Operand("k_norm", ("head_dim",), ("f32",), optional=True),
        Operand("inv_freq", ("rope_sets", "rotary_dim // 2"), ("f32",)),
        Operand("seq_rope", ("seqs",), ("i32",)),
        Operand("row_position", ("rows",), ("i32",)),
        Operand("row_seq", ("rows",), ("i32",)),
        Operand("block_table", ("seqs", "max_blocks"), ("i32",)),
        Operand("q_out", ("rows", "n_heads * head_dim"), FLOAT, "out"),
        Operand("k_cache", _CACHE, FLOAT, "inout"),
        Operand("v_cache", _CACHE, FLOAT, "inout"),
    ),
    dims=("rows", "seqs", "max_blocks", "blocks"),
    constants=("n_heads", "n_kv_heads", "head_dim", "rotary_dim", "rope_sets", "eps", "rope_scale"),
    float_constants=("eps", "rope_scale"),
    reference=reference,
    # Two rounded products may cancel; sin and cos of angles up to max_context differ in their last bits.
    tolerance={"f32": Tolerance(2e-5, 1e-5), "bf16": BF16},
)
