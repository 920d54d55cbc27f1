"""residual_rms_norm: ops residual_add and rms_norm in one pass over the residual stream."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import ACTIVATIONS, BF16, F8, F32, FLOAT, Arrays, Constants, Op, Operand
from atlas.ops.rms_norm import normalise


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """residual[r] += scale * x[r]; out = residual / sqrt(mean(residual^2) + eps) * weight. In fp32, out rounded once.

    Whether the scaled product is rounded before it is added is left open, as in op residual_add.
    """
    rows = dims["rows"]
    arrays["residual"][:rows] += arrays["x"][:rows].astype(np.float32) * np.float32(constants["scale"])
    arrays["out"][:rows] = normalise(arrays["residual"][:rows], constants["eps"]) * arrays["weight"]


RESIDUAL_RMS_NORM = Op(
    name="residual_rms_norm",
    operands=(
        Operand("x", ("rows", "hidden"), FLOAT),
        Operand("residual", ("rows", "hidden"), ("f32",), "inout"),
        Operand("weight", ("hidden",), ("f32",)),
        Operand("out", ("rows", "hidden"), ACTIVATIONS, "out"),
    ),
    dims=("rows",),
    constants=("hidden", "eps", "scale"),
    float_constants=("eps", "scale"),
    reference=reference,
    tolerance={"f32": F32, "bf16": BF16, "f8g128": F8},
)
