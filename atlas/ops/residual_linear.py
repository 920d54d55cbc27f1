"""residual_linear: a product added to the residual stream, and what the next product needs of it in place of its norm.

With op normed_linear or normed_gated_linear behind it, it is linear, residual_rms_norm and that product without a pass
over the rows between them: out is the normalised rows but for the factor 1 / RMS, one number a row, which the next
product multiplies its finished sums by.
"""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.norm_parts import SHARE, mean_squares
from atlas.ops.op import ACTIVATIONS, BF16, F8, F8_SUMS, WEIGHTS, Arrays, Constants, Op, Operand, Tolerance, product


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """residual[r] += scale * (x W^T + bias); out[r, n] = residual[r, n] * norm[n], rounded once; squares: shares of the
    residual's mean square, as op norm_parts has them."""
    rows, residual = dims["rows"], arrays["residual"]
    sums = product(arrays["x"][:rows].astype(np.float32), arrays["weight"])
    if "bias" in arrays:
        sums += arrays["bias"]
    residual[:rows] += np.float32(constants["scale"]) * sums
    arrays["out"][:rows] = residual[:rows] * arrays["norm"]
    arrays["squares"][:rows] = mean_squares(residual[:rows], float(constants["eps"]))


RESIDUAL_LINEAR = Op(
    name="residual_linear",
    operands=(
        Operand("x", ("rows", "k"), ACTIVATIONS),
        Operand("weight", ("n", "k"), WEIGHTS),
        Operand("bias", ("n",), ("f32",), optional=True),
        Operand("residual", ("rows", "n"), ("f32",), "inout"),
        Operand("norm", ("n",), ("f32",)),
        Operand("out", ("rows", "n"), ACTIVATIONS, "out"),
        Operand("squares", ("rows", f"ceil_div(n, {SHARE})"), ("f32",), "out"),
    ),
    dims=("rows",),
    constants=("n", "k", "eps", "scale"),
    float_constants=("eps", "scale"),
    reference=reference,
    # Of linear, on a sum with the residual; squares double the relative error.
    tolerance={
        "f32": Tolerance(4e-5, 1e-5),
        "bf16": BF16,
        "f8g128": F8,
        "x_f8g128.f32": Tolerance(2 * F8_SUMS.rtol, F8_SUMS.atol),
        "x_f8g128.bf16": Tolerance(BF16.rtol, F8_SUMS.atol),
        "x_f8g128.f8g128": Tolerance(F8.rtol, F8_SUMS.atol),
    },
)
