"""load_rows: plain rows of a checkpoint's matrix into the format and layout of a weight, while a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, FLOAT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r] = x[r], rounded once: to the element type, or to a format as load-time quantisation does on the host
    (atlas/weights/quantizers.py), bit for bit.

    x is row-major whatever the hardware; out lies as products read it. fault becomes 1 if a value is not finite;
    otherwise it stays as it is. The row of such a value is NaN in f8, and anything in a format of 4 bits.
    """
    rows, out = dims["rows"], arrays["out"]
    x = arrays["x"][:rows].astype(np.float32)
    format = getattr(out, "format", None)  # of a block format (atlas/weights/quantized.py)
    if format is None or format.element == "e4m3":
        out[:rows] = x
    else:
        from atlas.weights.quantized import to_rows
        from atlas.weights.quantizers import quantize_rows

        finite = np.where(np.isfinite(x).all(axis=1, keepdims=True), x, np.float32(0))
        out.raw[:rows] = to_rows(quantize_rows(finite, format.name), format.name)
    if "fault" in arrays and not np.isfinite(x).all():
        arrays["fault"][0] = 1


LOAD_ROWS = Op(
    name="load_rows",
    operands=(
        Operand("x", ("rows", "k"), FLOAT),
        Operand("out", ("rows", "k"), ("bf16", "f8", "nvfp4", "i4g32b"), "out"),
        Operand("fault", (1,), ("i32",), "inout", optional=True),
    ),
    dims=("rows",),
    constants=("k",),
    reference=reference,
    tolerance=dict.fromkeys(("bf16", "f8", "nvfp4", "i4g32b", "i32"), EXACT),
)
