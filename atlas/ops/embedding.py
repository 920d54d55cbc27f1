"""embedding: token ids -> rows of the token table, times a scale."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, FLOAT, Arrays, Constants, Op, Operand
from atlas.targets.formats import INTEGER_FORMATS


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r] = table[token(r)] * scale; a negative row_token means the last token sampled in the row's slot.

    A token outside the vocabulary gives a row of NaN: a slot remembers INVALID_TOKEN after logits that
    were not finite, and what is computed from it must not look like an answer.
    """
    rows = dims["rows"]
    tokens = arrays["row_token"][:rows].astype(np.int64)
    slots = arrays["seq_slot"][arrays["row_seq"][:rows]]
    tokens = np.where(tokens < 0, arrays["last_token"][slots], tokens)
    vocab = int(constants["vocab"])
    known = (tokens >= 0) & (tokens < vocab)
    table = arrays["table"][np.where(known, tokens, 0)].astype(np.float32)
    scaled = table * np.float32(constants["scale"])
    arrays["out"][:rows] = np.where(known[:, None], scaled, np.float32(np.nan))


EMBEDDING = Op(
    name="embedding",
    operands=(
        Operand("row_token", ("rows",), ("i32",)),
        Operand("row_seq", ("rows",), ("i32",)),
        Operand("seq_slot", ("seqs",), ("i32",)),
        Operand("last_token", ("slots",), ("i32",)),
        Operand("table", ("vocab", "hidden"), FLOAT + INTEGER_FORMATS),
        Operand("out", ("rows", "hidden"), ("f32",), "out"),
    ),
    dims=("rows", "seqs", "slots"),
    constants=("vocab", "hidden", "scale"),
    float_constants=("scale",),
    reference=reference,
    tolerance={"f32": EXACT},
)
