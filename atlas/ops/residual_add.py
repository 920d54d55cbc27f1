"""residual_add: residual += x."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, FLOAT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """residual[r] += x[r], in fp32."""
    arrays["residual"][: dims["rows"]] += arrays["x"][: dims["rows"]].astype(np.float32)


RESIDUAL_ADD = Op(
    name="residual_add",
    operands=(
        Operand("x", ("rows", "hidden"), FLOAT),
        Operand("residual", ("rows", "hidden"), ("f32",), "inout"),
    ),
    dims=("rows",),
    constants=("hidden",),
    reference=reference,
    tolerance={"f32": EXACT},
)
