"""rope_kv_append: rotate q and k (RoPE, arXiv 2104.09864) and append k, v to the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import BF16, FLOAT, Arrays, Constants, Op, Operand, Tolerance
from atlas.targets.shape import KV_BLOCK_SIZE


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """q_out = rope(q); cache[block_table[seq, position // 16], head, position % 16] = rope(k), v.

    A row of `qkv` is [q heads | k heads | v heads]. The rotation pairs element i with
    i + head_dim/2 by the angle position * inv_freq[i], computed in fp32.
    """
    rows, n_heads = dims["rows"], int(constants["n_heads"])
    n_kv_heads, head_dim = int(constants["n_kv_heads"]), int(constants["head_dim"])
    position = arrays["row_position"][:rows].astype(np.int64)
    angle = position.astype(np.float32)[:, None] * arrays["inv_freq"][None, :]
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    qkv = arrays["qkv"][:rows].astype(np.float32).reshape(rows, n_heads + 2 * n_kv_heads, head_dim)
    first, second = np.split(qkv[:, : n_heads + n_kv_heads], 2, axis=-1)
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    q_out, k_cache, v_cache = arrays["q_out"], arrays["k_cache"], arrays["v_cache"]
    q_out[:rows] = rotated[:, :n_heads].reshape(rows, -1).astype(q_out.dtype)
    block = arrays["block_table"][arrays["row_seq"][:rows], position // KV_BLOCK_SIZE]
    k_cache[block, :, position % KV_BLOCK_SIZE] = rotated[:, n_heads:].astype(k_cache.dtype)
    v_cache[block, :, position % KV_BLOCK_SIZE] = qkv[:, n_heads + n_kv_heads :].astype(v_cache.dtype)


_CACHE = ("blocks", "n_kv_heads", KV_BLOCK_SIZE, "head_dim")

ROPE_KV_APPEND = Op(
    name="rope_kv_append",
    operands=(
        Operand("qkv", ("rows", "(n_heads + 2 * n_kv_heads) * head_dim"), FLOAT),
        Operand("inv_freq", ("head_dim // 2",), ("f32",)),
        Operand("row_position", ("rows",), ("i32",)),
        Operand("row_seq", ("rows",), ("i32",)),
        Operand("block_table", ("seqs", "max_blocks"), ("i32",)),
        Operand("q_out", ("rows", "n_heads * head_dim"), FLOAT, "out"),
        Operand("k_cache", _CACHE, FLOAT, "inout"),
        Operand("v_cache", _CACHE, FLOAT, "inout"),
    ),
    dims=("rows", "seqs", "max_blocks", "blocks"),
    constants=("n_heads", "n_kv_heads", "head_dim"),
    reference=reference,
    # Two rounded products may cancel; sin and cos of angles up to max_context differ in their last bits.
    tolerance={"f32": Tolerance(2e-5, 1e-5), "bf16": BF16},
)
