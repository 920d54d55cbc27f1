"""linear_a8: rows, rounded to int8 in groups, times a weight matrix in an integer block format."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import F32, FLOAT, Arrays, Constants, Op, Operand
from atlas.targets.formats import GROUP, INTEGER_FORMATS

SMALLEST = 2.0**-120
"""A group whose largest magnitude is below this counts as zeros: 127 / a would overflow just beyond it."""


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r, n] = sum over groups of xs * (ws * dot(qx, qw) + m * sum(qx)), summed over k in order, + bias[n].

    Each row of x is rounded in groups of 32 columns (the last may be shorter), in fp32: a = max |x|,
    q = rint(x * (127 / a)) half to even, scale xs = a / 127. A group with a below 2^-120 gives zeros; one with
    a NaN or an infinity makes the row's outputs NaN. qw are the weight's codes less their bias or zero point,
    ws and m its scales and minimums. Integer sums are exact; kernels scale and sum them in fp32, the reference
    in fp64.
    """
    rows, k = dims["rows"], int(constants["k"])
    weight = arrays["weight"].quantized()
    groups = -(-k // GROUP)
    padded = np.zeros((rows, groups * GROUP), np.float32)
    padded[:, :k] = arrays["x"][:rows].astype(np.float32)
    x = padded.reshape(rows, groups, GROUP)
    finite = np.all(np.isfinite(x), axis=-1, keepdims=True)
    largest = np.abs(x).max(-1, initial=0.0, where=finite)
    finite = finite[:, :, 0]
    used = finite & (largest >= np.float32(SMALLEST))
    factor = np.float32(127) / np.where(used, largest, np.float32(1))
    codes = np.rint(np.where(used[:, :, None], x, np.float32(0)) * factor[:, :, None])
    scale = np.where(used, largest / np.float32(127), np.where(finite, np.float32(0), np.float32(np.nan)))

    out = np.zeros((rows, int(constants["n"])), np.float64)
    for g in range(groups):
        part = weight.codes[:, g * GROUP : (g + 1) * GROUP].astype(np.float32)
        if weight.zeros is not None:
            part = part - weight.zeros[:, g : g + 1]
        q = codes[:, g, : part.shape[1]]
        value = (q @ part.T).astype(np.float64) * weight.scales[:, g]  # the product is exact in fp32
        if weight.minimums is not None:
            value += q.sum(-1, dtype=np.float64)[:, None] * weight.minimums[:, g]
        out += scale[:, g, None] * value
    if "bias" in arrays:
        out += arrays["bias"]
    arrays["out"][:rows] = out


LINEAR_A8 = Op(
    name="linear_a8",
    operands=(
        Operand("x", ("rows", "k"), FLOAT),
        Operand("weight", ("n", "k"), INTEGER_FORMATS),
        Operand("bias", ("n",), ("f32",), optional=True),
        Operand("out", ("rows", "n"), ("f32",), "out"),
    ),
    dims=("rows",),
    constants=("n", "k"),
    reference=reference,
    tolerance={"f32": F32},
)
