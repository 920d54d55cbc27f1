"""rms_norm: root-mean-square normalisation of each row (Zhang & Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import BF16, F32, FLOAT, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once."""
    x = arrays["x"][: dims["rows"]].astype(np.float32)
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(constants["eps"]))
    out = arrays["out"]
    out[: dims["rows"]] = (x * scale * arrays["weight"]).astype(out.dtype)


RMS_NORM = Op(
    name="rms_norm",
    operands=(
        Operand("x", ("rows", "hidden"), ("f32",)),
        Operand("weight", ("hidden",), ("f32",)),
        Operand("out", ("rows", "hidden"), FLOAT, "out"),
    ),
    dims=("rows",),
    constants=("hidden", "eps"),
    float_constants=("eps",),
    reference=reference,
    tolerance={"f32": F32, "bf16": BF16},
)
