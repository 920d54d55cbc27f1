"""load_rows: plain rows of a checkpoint's matrix into the format and layout of a weight, while a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, FLOAT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r] = x[r], rounded once: to the element type, or to a format of E4M3 as atlas/weights/e4m3.py defines.

    Of f8g128, SHARED_ROWS rows share their scales. x is row-major whatever the hardware; out lies as products read it.
    fault becomes 1 if a value is not finite; otherwise it stays as it is.
    """
    rows, out = dims["rows"], arrays["out"]
    x = arrays["x"][:rows].astype(np.float32)
    if hasattr(out, "write"):  # in a block format (atlas/weights/quantized.py)
        out.write(slice(rows), x, SHARED_ROWS if out.format.name == "f8g128" else 1)
    else:
        out[:rows] = x
    if "fault" in arrays and not np.isfinite(x).all():
        arrays["fault"][0] = 1


SHARED_ROWS = 128
"""Rows of a weight made f8g128 at load that share scales, in the order in which they are stored. E4M3 numbers have one
relative precision at any scale, and products of prompts add blocks of one scale a third faster than rows with scales of
their own (docs/kernels/ledger.md)."""

LOAD_ROWS = Op(
    name="load_rows",
    operands=(
        Operand("x", ("rows", "k"), FLOAT),
        Operand("out", ("rows", "k"), ("bf16", "f8", "f8g128"), "out"),
        Operand("fault", (1,), ("i32",), "inout", optional=True),
    ),
    dims=("rows",),
    constants=("k",),
    reference=reference,
    tolerance={"bf16": EXACT, "f8": EXACT, "f8g128": EXACT, "i32": EXACT},
)
