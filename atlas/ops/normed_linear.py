"""normed_linear: linear of rows of op residual_linear or norm_parts, yet to be divided by their root mean square."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.ops.lazy import np
from atlas.ops.linear import LINEAR
from atlas.ops.norm_parts import SHARE
from atlas.ops.op import Arrays, Constants, Op, Operand, product

SQUARES = Operand("squares", ("rows", f"ceil_div(k, {SHARE})"), ("f32",))
"""Shares of each row's mean square, as op norm_parts has them."""


def normed_product(arrays: Arrays, rows: int) -> Any:
    """The sums of rows of x with weight, over each row's root mean square, and the bias, if there is one; fp32."""
    sums = product(arrays["x"][:rows].astype(np.float32), arrays["weight"])
    sums = sums / np.sqrt(arrays["squares"][:rows].sum(-1, keepdims=True))
    return sums + arrays["bias"] if "bias" in arrays else sums


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r, n] = sum_k x[r, k] * weight[n, k] / sqrt(sum_b squares[r, b]) + bias[n], as op linear otherwise."""
    out, rows = arrays["out"], dims["rows"]
    out[:rows] = normed_product(arrays, rows).astype(out.dtype)


NORMED_LINEAR = Op(
    name="normed_linear",
    operands=(*LINEAR.operands[:-1], SQUARES, LINEAR.operands[-1]),
    dims=LINEAR.dims,
    constants=LINEAR.constants,
    reference=reference,
    tolerance=LINEAR.tolerance,
)
