"""quantize_rows: activations to E4M3 codes with one scale per row and 128 columns, as fp8 products read them."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, FLOAT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r] = x[r] in format f8g128, whose rounding atlas/weights/e4m3.py defines bit for bit."""
    rows = dims["rows"]
    arrays["out"][:rows] = arrays["x"][:rows].astype(np.float32)


QUANTIZE_ROWS = Op(
    name="quantize_rows",
    operands=(
        Operand("x", ("rows", "k"), FLOAT),
        Operand("out", ("rows", "k"), ("f8g128",), "out"),
    ),
    dims=("rows",),
    constants=("k",),
    reference=reference,
    tolerance={"f8g128": EXACT},
)
