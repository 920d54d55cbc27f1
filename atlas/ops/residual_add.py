"""residual_add: residual += scale * x."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import F32, FLOAT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """residual[r] += scale * x[r], in fp32; whether the product is rounded before it is added is left open."""
    scaled = arrays["x"][: dims["rows"]].astype(np.float32) * np.float32(constants["scale"])
    arrays["residual"][: dims["rows"]] += scaled


RESIDUAL_ADD = Op(
    name="residual_add",
    operands=(
        Operand("x", ("rows", "hidden"), FLOAT),
        Operand("residual", ("rows", "hidden"), ("f32",), "inout"),
    ),
    dims=("rows",),
    constants=("hidden", "scale"),
    float_constants=("scale",),
    reference=reference,
    tolerance={"f32": F32},
)
