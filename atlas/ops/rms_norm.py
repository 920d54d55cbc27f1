"""rms_norm: root-mean-square normalisation of each row (Zhang & Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.ops.lazy import np
from atlas.ops.op import ACTIVATIONS, BF16, F8, F32, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once."""
    x = arrays["x"][: dims["rows"]].astype(np.float32)
    arrays["out"][: dims["rows"]] = normalise(x, constants["eps"]) * arrays["weight"]


def normalise(x: Any, eps: float) -> Any:
    """x / sqrt(mean(x^2) + eps) of each row of an fp32 array."""
    return x * (1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)))


RMS_NORM = Op(
    name="rms_norm",
    operands=(
        Operand("x", ("rows", "hidden"), ("f32",)),
        Operand("weight", ("hidden",), ("f32",)),
        Operand("out", ("rows", "hidden"), ACTIVATIONS, "out"),
    ),
    dims=("rows",),
    constants=("hidden", "eps"),
    float_constants=("eps",),
    reference=reference,
    tolerance={"f32": F32, "bf16": BF16, "f8g128": F8},
)
