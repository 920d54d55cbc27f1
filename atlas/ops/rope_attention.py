"""rope_attention: rope_kv_append and paged_attention of the same rows in one, for rows of generated tokens."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops import paged_attention, rope_kv_append
from atlas.ops.lazy import np
from atlas.ops.op import ACTIVATIONS, F8, FLOAT, Arrays, Constants, Op, Operand, Tolerance
from atlas.targets.shape import KV_BLOCK_SIZE


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r] = attention of rope(norm(q[r])) over the caches, to which rope(norm(k)) and v of all rows were appended.

    Exactly what rope_kv_append, paged_attention and, where out is f8g128, quantize_rows do one after the other: what
    only they would exchange, q and the rows to quantise, is rounded to the cache's dtype. A row sees the k and v of its
    sequence's rows up to itself, those of this step among them.

    Rows of one sequence stand next to each other, at ascending consecutive positions.
    """
    rows, k_cache, out = dims["rows"], arrays["k_cache"], arrays["out"]
    width = int(constants["n_heads"]) * int(constants["head_dim"])
    q, attended = (np.empty((rows, width), k_cache.dtype) for _ in range(2))
    quantised = getattr(out, "format", None) is not None
    rope_kv_append.reference({**arrays, "q_out": q}, dims, constants)
    paged_attention.reference({**arrays, "q": q, "out": attended if quantised else out}, dims, constants)
    if quantised:
        out[:rows] = attended.astype(np.float32)


_CACHE = ("blocks", "n_kv_heads", KV_BLOCK_SIZE, "head_dim")

ROPE_ATTENTION = Op(
    name="rope_attention",
    operands=(
        Operand("qkv", ("rows", "(n_heads + 2 * n_kv_heads) * head_dim"), FLOAT),
        Operand("q_norm", ("head_dim",), ("f32",), optional=True),
        Operand("k_norm", ("head_dim",), ("f32",), optional=True),
        Operand("inv_freq", ("rope_sets", "rotary_dim // 2"), ("f32",)),
        Operand("seq_rope", ("seqs",), ("i32",)),
        Operand("row_position", ("rows",), ("i32",)),
        Operand("row_seq", ("rows",), ("i32",)),
        Operand("block_table", ("seqs", "max_blocks"), ("i32",)),
        Operand("k_cache", _CACHE, FLOAT, "inout"),
        Operand("v_cache", _CACHE, FLOAT, "inout"),
        Operand("out", ("rows", "n_heads * head_dim"), ACTIVATIONS, "out"),
    ),
    dims=("rows", "seqs", "max_blocks", "blocks"),
    constants=(
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "rotary_dim",
        "rope_sets",
        "eps",
        "rope_scale",
        "window",
        "scale",
    ),
    float_constants=("eps", "rope_scale", "scale"),
    reference=reference,
    # Of paged_attention, with q and k that may differ in their last bits; f8g128 may round those rows the other way.
    tolerance={
        "f32": Tolerance(1e-4, 5e-5),
        "bf16": Tolerance(1.0 / 64, 4e-3),
        "f8g128": Tolerance(F8.rtol + 1.0 / 64, 4e-3),
    },
)
