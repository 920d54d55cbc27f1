"""paged_attention: causal grouped-query attention of each row over its sequence's KV blocks."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import ACTIVATIONS, F8, FLOAT, Arrays, Constants, Op, Operand, Tolerance
from atlas.targets.shape import KV_BLOCK_SIZE


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r, h] = softmax(q[r, h] . K * scale) V over positions first..row_position[r].

    first is 0, or with a `window` w above 0 row_position[r] - w + 1: a token sees itself and w - 1 before
    it. A row reads neither a block wholly before its first position nor that block's entry of the table:
    the cache may have freed it.

    Scores, softmax and the weighted sum are fp32. The kernel must compute a row by the same
    arithmetic whether it comes alone, in a batch or in any chunk of its prompt.

    Rows in f8g128 are what quantize_rows makes of rows that were not rounded before.
    """
    n_heads, n_kv_heads = int(constants["n_heads"]), int(constants["n_kv_heads"])
    head_dim, window = int(constants["head_dim"]), int(constants["window"])
    rows = dims["rows"]
    sequence = arrays["row_seq"][:rows]
    positions = arrays["row_position"][:rows].astype(np.int64)
    firsts = np.maximum(positions - window + 1, 0) if window else np.zeros_like(positions)
    q = arrays["q"][:rows].astype(np.float32).reshape(rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    out = arrays["out"]
    attended = np.empty((rows, q.shape[1] * q.shape[2] * head_dim), np.float32)
    for seq in np.unique(sequence):
        members = np.flatnonzero(sequence == seq)
        first_block, length = int(firsts[members].min()) // KV_BLOCK_SIZE, int(positions[members].max()) + 1
        begin = first_block * KV_BLOCK_SIZE
        blocks = arrays["block_table"][seq, first_block : -(-length // KV_BLOCK_SIZE)]
        # [blocks, heads, 16, dim] -> [heads, length - begin, dim]
        keys, values = (
            arrays[name][blocks]
            .astype(np.float32)
            .transpose(1, 0, 2, 3)
            .reshape(n_kv_heads, -1, head_dim)[:, : length - begin]
            for name in ("k_cache", "v_cache")
        )
        scores = np.einsum("rhgd,hld->rhgl", q[members], keys, optimize=True) * np.float32(constants["scale"])
        at = np.arange(begin, length)
        visible = (firsts[members][:, None] <= at) & (at <= positions[members][:, None])
        scores = np.where(visible[:, None, None, :], scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        result = np.einsum("rhgl,hld->rhgd", weights, values, optimize=True)
        broken = ~np.isfinite(values).all(axis=(0, 2))
        for i, sees in enumerate(visible):
            if (broken & ~sees).any():  # 0 x NaN is NaN, and no row may have it of a token that it does not see
                result[i] = np.einsum("hgl,hld->hgd", weights[i][:, :, sees], values[:, sees], optimize=True)
        attended[members] = result.reshape(len(members), -1)
    out[:rows] = attended


_CACHE = ("blocks", "n_kv_heads", KV_BLOCK_SIZE, "head_dim")

PAGED_ATTENTION = Op(
    name="paged_attention",
    operands=(
        Operand("q", ("rows", "n_heads * head_dim"), FLOAT),
        Operand("k_cache", _CACHE, FLOAT),
        Operand("v_cache", _CACHE, FLOAT),
        Operand("row_position", ("rows",), ("i32",)),
        Operand("row_seq", ("rows",), ("i32",)),
        Operand("block_table", ("seqs", "max_blocks"), ("i32",)),
        Operand("out", ("rows", "n_heads * head_dim"), ACTIVATIONS, "out"),
    ),
    dims=("rows", "seqs", "max_blocks", "blocks"),
    constants=("n_heads", "n_kv_heads", "head_dim", "window", "scale"),
    float_constants=("scale",),
    reference=reference,
    # Scores of 80, which sharp softmaxes have, are off by up to 4e-5 in fp32, and weights by that share of themselves.
    tolerance={
        "f32": Tolerance(1e-4, 4e-5),
        "bf16": Tolerance(1.0 / 64, 4e-3),
        "f8g128": Tolerance(F8.rtol + 1.0 / 64, 4e-3),
    },
)
