"""swiglu: silu(gate) * up (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import BF16, F32, FLOAT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out = gate / (1 + exp(-gate)) * up, in fp32, rounded once. A row of `gate_up` is [gate | up]."""
    gate, up = np.split(arrays["gate_up"][: dims["rows"]].astype(np.float32), 2, axis=-1)
    out = arrays["out"]
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, 0
        out[: dims["rows"]] = (gate / (1.0 + np.exp(-gate)) * up).astype(out.dtype)


SWIGLU = Op(
    name="swiglu",
    operands=(
        Operand("gate_up", ("rows", "2 * intermediate"), FLOAT),
        Operand("out", ("rows", "intermediate"), FLOAT, "out"),
    ),
    dims=("rows",),
    constants=("intermediate",),
    reference=reference,
    tolerance={"f32": F32, "bf16": BF16},
)
