"""gated_activation: act(gate) * up, the middle of a gated MLP (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atlas.ops.lazy import np
from atlas.ops.op import ACTIVATIONS, BF16, F8, F32, FLOAT, Arrays, Constants, Op, Operand

SILU, GELU_TANH, GELU_ERF = 0, 1, 2
"""Values of the constant `activation`: SwiGLU, and GeGLU with the tanh approximation or the exact GELU."""


def activate(x: Any, activation: int) -> Any:
    """The activation of an fp32 array. GELU is x * Phi(x), Phi by tanh or exact (Hendrycks, arXiv 1606.08415)."""
    with np.errstate(over="ignore", invalid="ignore"):  # exp(-x) = inf gives the right limit, 0
        if activation == SILU:
            return x / (1.0 + np.exp(-x))
        if activation == GELU_TANH:
            inner = np.float32(math.sqrt(2.0 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
            return np.float32(0.5) * x * (1.0 + np.tanh(inner))
        # NumPy has no erf. erfc keeps the digits of large negative x.
        erfc = np.frompyfunc(math.erfc, 1, 1)(x.astype(np.float64) * -(0.5**0.5)).astype(np.float64)
        return (0.5 * x * erfc).astype(np.float32)


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out = act(gate) * up, in fp32, rounded once. A row of `gate_up` is [gate | up]."""
    gate, up = np.split(arrays["gate_up"][: dims["rows"]].astype(np.float32), 2, axis=-1)
    arrays["out"][: dims["rows"]] = activate(gate, int(constants["activation"])) * up


GATED_ACTIVATION = Op(
    name="gated_activation",
    operands=(
        Operand("gate_up", ("rows", "2 * intermediate"), FLOAT),
        Operand("out", ("rows", "intermediate"), ACTIVATIONS, "out"),
    ),
    dims=("rows",),
    constants=("intermediate", "activation"),
    reference=reference,
    tolerance={"f32": F32, "bf16": BF16, "f8g128": F8},
)
