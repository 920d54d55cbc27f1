"""rope_rows: what RoPE and the paged KV cache say of a step's rows, the same in every layer: their turns and places."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import Arrays, Constants, Op, Operand, Tolerance
from atlas.ops.rope_kv_append import turns_and_places
from atlas.targets.shape import KV_BLOCK_SIZE


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """turns[r, i] = rope_scale * (cos, sin) of position * inv_freq[seq_rope[seq], i], as op rope_kv_append has them;

    places[r] = block_table[seq, position // 16] * 16 + position % 16.
    """
    rows = dims["rows"]
    turn, (block, slot) = turns_and_places(arrays, rows, constants)
    arrays["turns"][:rows] = np.stack(turn, axis=-1)
    arrays["places"][:rows] = block * KV_BLOCK_SIZE + slot


ROPE_ROWS = Op(
    name="rope_rows",
    operands=(
        Operand("inv_freq", ("rope_sets", "rotary_dim // 2"), ("f32",)),
        Operand("seq_rope", ("seqs",), ("i32",)),
        Operand("row_position", ("rows",), ("i32",)),
        Operand("row_seq", ("rows",), ("i32",)),
        Operand("block_table", ("seqs", "max_blocks"), ("i32",)),
        Operand("turns", ("rows", "rotary_dim // 2", 2), ("f32",), "out"),
        Operand("places", ("rows",), ("i32",), "out"),
    ),
    dims=("rows", "seqs", "max_blocks"),
    constants=("rotary_dim", "rope_sets", "rope_scale"),
    float_constants=("rope_scale",),
    reference=reference,
    # sin and cos of angles up to max_context differ in their last bits.
    tolerance={"f32": Tolerance(2e-5, 1e-6), "i32": Tolerance(0.0, 0.0)},
)
