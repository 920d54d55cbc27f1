"""mask_logits: forbid the tokens that a host-delivered bit mask leaves out (grammars)."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """logits[i, v] = -inf where bit v of mask[mask_index[i]] is 0; a negative mask_index leaves row i alone.

    Bit v is bit v % 32 of word v // 32.
    """
    vocab = int(constants["vocab"])
    for i, index in enumerate(arrays["mask_index"][: dims["logits"]]):
        if index >= 0:
            bits = np.unpackbits(arrays["mask"][index].view(np.uint8), bitorder="little")[:vocab]
            arrays["logits"][i][bits == 0] = -np.inf


MASK_LOGITS = Op(
    name="mask_logits",
    operands=(
        Operand("mask_index", ("logits",), ("i32",)),
        Operand("mask", ("logits", "ceil_div(vocab, 32)"), ("u32",)),
        Operand("logits", ("logits", "vocab"), ("f32",), "inout"),
    ),
    dims=("logits",),
    constants=("vocab",),
    reference=reference,
    tolerance={"f32": EXACT},
)
