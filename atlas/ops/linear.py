"""linear: rows times a weight matrix, out = x W^T."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import BF16, FLOAT, Arrays, Constants, Op, Operand, Tolerance


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r, n] = sum_k x[r, k] * weight[n, k], accumulated in fp32, rounded once.

    A kernel must compute each row by the same arithmetic whatever the other rows are, so that an
    answer does not depend on the load.
    """
    x = arrays["x"][: dims["rows"]].astype(np.float32)
    out = arrays["out"]
    out[: dims["rows"]] = (x @ arrays["weight"].astype(np.float32).T).astype(out.dtype)


LINEAR = Op(
    name="linear",
    operands=(
        Operand("x", ("rows", "k"), FLOAT),
        Operand("weight", ("n", "k"), FLOAT),
        Operand("out", ("rows", "n"), FLOAT, "out"),
    ),
    dims=("rows",),
    constants=("n", "k"),
    reference=reference,
    # atol covers cancellation in sums of K terms: the error scales with the terms, not with the sum.
    tolerance={"f32": Tolerance(2e-5, 1e-5), "bf16": BF16},
)
