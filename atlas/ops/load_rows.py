"""load_rows: plain rows of a checkpoint's matrix into the format and layout of a weight, while a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, FLOAT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r] = x[r], rounded once: to the element type, or in format f8g128 as atlas/weights/activations.py defines.

    x is row-major whatever the hardware; out lies as products read it.
    """
    rows = dims["rows"]
    arrays["out"][:rows] = arrays["x"][:rows].astype(np.float32)


LOAD_ROWS = Op(
    name="load_rows",
    operands=(
        Operand("x", ("rows", "k"), FLOAT),
        Operand("out", ("rows", "k"), ("bf16", "f8g128"), "out"),
    ),
    dims=("rows",),
    constants=("k",),
    reference=reference,
    tolerance={"bf16": EXACT, "f8g128": EXACT},
)
