"""linear: rows times a weight matrix, out = x W^T + bias."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import ACTIVATIONS, BF16, F8_SUMS, FLOAT, WEIGHTS, Arrays, Constants, Op, Operand, Tolerance, product


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r, n] = sum_k x[r, k] * weight[n, k] + bias[n], accumulated in fp32, rounded once; no bias: 0.

    Block formats stand for their values, of 4 bits rounded to bf16 (op.product); a kernel may scale sums instead of
    the elements.
    A kernel must compute each row by the same arithmetic whatever the other rows are, so that an
    answer does not depend on the load.
    """
    x = arrays["x"][: dims["rows"]].astype(np.float32)
    out = arrays["out"]
    sums = product(x, arrays["weight"])
    if "bias" in arrays:
        sums += arrays["bias"]
    out[: dims["rows"]] = sums.astype(out.dtype)


LINEAR = Op(
    name="linear",
    operands=(
        Operand("x", ("rows", "k"), ACTIVATIONS),
        Operand("weight", ("n", "k"), WEIGHTS),
        Operand("bias", ("n",), ("f32",), optional=True),
        Operand("out", ("rows", "n"), FLOAT, "out"),
    ),
    dims=("rows",),
    constants=("n", "k"),
    reference=reference,
    # atol covers cancellation in sums of K terms: the error scales with the terms, not with the sum.
    tolerance={
        "f32": Tolerance(2e-5, 1e-5),
        "bf16": BF16,
        "x_f8g128.f32": F8_SUMS,
        "x_f8g128.bf16": Tolerance(BF16.rtol, F8_SUMS.atol),
    },
)
