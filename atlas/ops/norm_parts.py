"""norm_parts: rms_norm of rows of the residual stream without its division, as op residual_linear leaves rows.

For rows that no product was just added to: behind the embedding, and those that are chosen for their logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.ops.lazy import np
from atlas.ops.op import ACTIVATIONS, BF16, F8, F32, Arrays, Constants, Op, Operand

SHARE = 128
"""Columns of the residual stream whose squares are one number of `squares`."""


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out = x * weight, rounded once; squares as `mean_squares` has them."""
    rows = dims["rows"]
    x = arrays["x"][:rows]
    arrays["out"][:rows] = x * arrays["weight"]
    arrays["squares"][:rows] = mean_squares(x, float(constants["eps"]))


def mean_squares(x: Any, eps: float) -> Any:
    """[rows, blocks] of f32 rows: sum over columns c of block b of x[r, c]^2 / hidden + eps / blocks, blocks of 128.

    A row's numbers add up to what rms_norm divides by the root of.
    """
    rows, hidden = x.shape
    blocks = -(-hidden // SHARE)
    squares = np.zeros((rows, blocks * SHARE), np.float32)
    squares[:, :hidden] = np.square(x)
    return squares.reshape(rows, blocks, SHARE).sum(-1) / np.float32(hidden) + np.float32(eps / blocks)


NORM_PARTS = Op(
    name="norm_parts",
    operands=(
        Operand("x", ("rows", "hidden"), ("f32",)),
        Operand("weight", ("hidden",), ("f32",)),
        Operand("out", ("rows", "hidden"), ACTIVATIONS, "out"),
        Operand("squares", ("rows", f"ceil_div(hidden, {SHARE})"), ("f32",), "out"),
    ),
    dims=("rows",),
    constants=("hidden", "eps"),
    float_constants=("eps",),
    reference=reference,
    tolerance={"f32": F32, "bf16": BF16, "f8g128": F8},
)
