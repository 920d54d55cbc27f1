"""gather_rows: pick the rows whose logits are wanted."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.op import EXACT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[i] = x[index[i]]."""
    logits = dims["logits"]
    arrays["out"][:logits] = arrays["x"][arrays["index"][:logits]]


GATHER_ROWS = Op(
    name="gather_rows",
    operands=(
        Operand("x", ("rows", "hidden"), ("f32",)),
        Operand("index", ("logits",), ("i32",)),
        Operand("out", ("logits", "hidden"), ("f32",), "out"),
    ),
    dims=("rows", "logits"),
    constants=("hidden",),
    reference=reference,
    tolerance={"f32": EXACT},
)
