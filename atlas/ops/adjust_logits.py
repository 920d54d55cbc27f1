"""adjust_logits: what a request wants changed about its logits: bias, penalties, masks."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, F32, Arrays, Constants, Op, Operand

ADJUST_BIAS, ADJUST_PENALTIES, ADJUST_MASK = 1, 2, 4
"""Bits of `adjust`: what applies to a row. 0: nothing, and the row of `adjusted` is not written."""

COUNT_PROMPT = 1 << 31
"""Bit of `token_count` that says that a token occurs in the prompt; the others count how often it was generated."""


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """adjusted[i] = logits[i] with, in this order and as adjust[i] says,

    - bias[slot] added;
    - logits of tokens that occurred divided by `repetition` where positive, else multiplied by it (Keskar et
      al. 2019); then `frequency` times the generated count subtracted, and `presence` where that is not 0;
    - -inf where bit v of mask[mask_index[i]] is 0. Bit v is bit v % 32 of word v // 32.

    A NaN stays one. Rows with adjust 0 are left alone.
    """
    vocab = int(constants["vocab"])
    for i in range(dims["logits"]):
        adjust, slot = int(arrays["adjust"][i]), int(arrays["slot"][i])
        if adjust == 0:
            continue
        x = arrays["logits"][i].astype(np.float32)
        if adjust & ADJUST_BIAS:
            x += arrays["bias"][slot]
        if adjust & ADJUST_PENALTIES:
            count = arrays["token_count"][slot]
            generated = count & 0x7FFFFFFF
            repetition = arrays["repetition"][i]
            x = np.where(count != 0, np.where(x > 0, x / repetition, x * repetition), x)
            x -= arrays["frequency"][i] * generated.astype(np.float32)
            x -= np.where(generated > 0, arrays["presence"][i], np.float32(0))
        if adjust & ADJUST_MASK:
            words = arrays["mask"][arrays["mask_index"][i]]
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
            x[(allowed == 0) & ~np.isnan(x)] = -np.inf
        arrays["adjusted"][i] = x


ADJUST_LOGITS = Op(
    name="adjust_logits",
    operands=(
        Operand("logits", ("logits", "vocab"), ("f32",)),
        Operand("adjust", ("logits",), ("i32",)),
        Operand("slot", ("logits",), ("i32",)),
        Operand("bias", ("slots", "vocab"), ("f32",)),
        Operand("token_count", ("slots", "vocab"), ("i32",)),
        Operand("repetition", ("logits",), ("f32",)),
        Operand("frequency", ("logits",), ("f32",)),
        Operand("presence", ("logits",), ("f32",)),
        Operand("mask_index", ("logits",), ("i32",)),
        Operand("mask", ("logits", "ceil_div(vocab, 32)"), ("u32",)),
        # "out" although rows may be left alone: whoever reads it goes by the same `adjust`.
        Operand("adjusted", ("logits", "vocab"), ("f32",), "out"),
    ),
    dims=("logits", "slots"),
    constants=("vocab",),
    reference=reference,
    tolerance={"f32": F32, "i32": EXACT},
)
