"""normed_logits: a normed_linear that leaves logits, and for greedy rows no more than those that may be the largest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.ops.lazy import np
from atlas.ops.normed_linear import NORMED_LINEAR, normed_product
from atlas.ops.op import Arrays, Constants, Op, Operand, Tolerance

OF = 16
"""Columns of which the largest is kept."""

GROUPS = f"ceil_div(n, {OF})"


def largest_of(logits: Any) -> tuple[Any, Any]:
    """Of each row's columns from every OF on the largest, NaN if one of them is, and the first column that has it."""
    rows, columns = logits.shape
    groups = np.full((rows, -(-columns // OF), OF), -np.inf, np.float32)
    groups.reshape(rows, groups.shape[1] * OF)[:, :columns] = logits
    ids = np.argmax(groups, -1) + OF * np.arange(groups.shape[1])
    return groups.max(-1), ids.astype(np.int32)


def kept_rows(arrays: Arrays, rows: int) -> Any:
    """Of which rows all logits are read: those that are drawn, adjusted, or asked for log-probabilities."""
    return (arrays["temperature"][:rows] > 0) | (arrays["adjust"][:rows] != 0) | (arrays["n_top"][:rows] >= 0)


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r] as normed_linear leaves it, of rows as above; largest and largest_id of all rows."""
    rows = dims["rows"]
    logits = normed_product(arrays, rows).astype(np.float32)
    kept = kept_rows(arrays, rows)
    arrays["out"][:rows][kept] = logits[kept]
    arrays["largest"][:rows], arrays["largest_id"][:rows] = largest_of(logits)


_X, _WEIGHT, _BIAS, _SQUARES = NORMED_LINEAR.operands[:-1]

NORMED_LOGITS = Op(
    name="normed_logits",
    operands=(
        _X,
        _WEIGHT,
        _BIAS,
        _SQUARES,
        Operand("temperature", ("rows",), ("f32",)),
        Operand("adjust", ("rows",), ("i32",)),
        Operand("n_top", ("rows",), ("i32",)),
        Operand("out", ("rows", "n"), ("f32",), "out"),
        Operand("largest", ("rows", GROUPS), ("f32",), "out"),
        Operand("largest_id", ("rows", GROUPS), ("i32",), "out"),
    ),
    dims=NORMED_LINEAR.dims,
    constants=NORMED_LINEAR.constants,
    reference=reference,
    # Of two columns that are almost equal either may be the largest: which of 16, only its bits tell.
    tolerance={**NORMED_LINEAR.tolerance, "i32": Tolerance(0.0, 0.0, apart=OF - 1)},
)
