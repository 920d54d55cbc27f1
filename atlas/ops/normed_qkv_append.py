"""normed_qkv_append: normed_linear and rope_kv_append of the same rows in one, for rows whose turns are known."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.normed_linear import SQUARES, normed_product
from atlas.ops.op import ACTIVATIONS, BF16, F8_SUMS, FLOAT, WEIGHTS, Arrays, Constants, Op, Operand, Tolerance
from atlas.ops.rope_kv_append import append
from atlas.targets.shape import KV_BLOCK_SIZE


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """What rope_kv_append does with the rows of normed_linear, which are not rounded between the two.

    turns, places: of the rows, as op rope_rows leaves them.
    """
    rows = dims["rows"]
    qkv = normed_product(arrays, rows).astype(np.float32)
    turns, places = arrays["turns"][:rows], arrays["places"][:rows]
    turn, place = (turns[..., 0], turns[..., 1]), (places // KV_BLOCK_SIZE, places % KV_BLOCK_SIZE)
    append(arrays, qkv, turn, place, constants)


_HEADS = "(n_heads + 2 * n_kv_heads) * head_dim"
_CACHE = ("blocks", "n_kv_heads", KV_BLOCK_SIZE, "head_dim")

NORMED_QKV_APPEND = Op(
    name="normed_qkv_append",
    operands=(
        Operand("x", ("rows", "k"), ACTIVATIONS),
        Operand("weight", (_HEADS, "k"), WEIGHTS),
        Operand("bias", (_HEADS,), ("f32",), optional=True),
        SQUARES,
        Operand("q_norm", ("head_dim",), ("f32",), optional=True),
        Operand("k_norm", ("head_dim",), ("f32",), optional=True),
        Operand("turns", ("rows", "rotary_dim // 2", 2), ("f32",)),
        Operand("places", ("rows",), ("i32",)),
        Operand("q_out", ("rows", "n_heads * head_dim"), FLOAT, "out"),
        Operand("k_cache", _CACHE, FLOAT, "inout"),
        Operand("v_cache", _CACHE, FLOAT, "inout"),
    ),
    dims=("rows", "blocks"),
    constants=("n_heads", "n_kv_heads", "head_dim", "rotary_dim", "k", "eps"),
    float_constants=("eps",),
    reference=reference,
    tolerance={
        "f32": Tolerance(4e-5, 2e-5),
        "bf16": BF16,
        "x_f8g128.f32": Tolerance(2 * F8_SUMS.rtol, 2 * F8_SUMS.atol),
        "x_f8g128.bf16": Tolerance(BF16.rtol, 2 * F8_SUMS.atol),
    },
)
