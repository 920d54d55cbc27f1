"""gated_linear: the first product of a gated MLP and its activation, ops linear and gated_activation in one."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.gated_activation import activate
from atlas.ops.lazy import np
from atlas.ops.op import ACTIVATIONS, BF16, F8, F8_SUMS, WEIGHTS, Arrays, Constants, Op, Operand, Tolerance, product


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out = act(x Wg^T + bg) * (x Wu^T + bu), in fp32, rounded once; weight is [Wg; Wu], bias [bg; bu].

    Both products are summed as op linear's; neither is rounded before the activation.
    """
    x = arrays["x"][: dims["rows"]].astype(np.float32)
    sums = product(x, arrays["weight"])
    if "bias" in arrays:
        sums += arrays["bias"]
    gate, up = np.split(sums, 2, axis=-1)
    arrays["out"][: dims["rows"]] = activate(gate, int(constants["activation"])) * up


GATED_LINEAR = Op(
    name="gated_linear",
    operands=(
        Operand("x", ("rows", "k"), ACTIVATIONS),
        Operand("weight", ("2 * intermediate", "k"), WEIGHTS),
        Operand("bias", ("2 * intermediate",), ("f32",), optional=True),
        Operand("out", ("rows", "intermediate"), ACTIVATIONS, "out"),
    ),
    dims=("rows",),
    constants=("intermediate", "k", "activation"),
    reference=reference,
    # Of linear, doubled: the activation multiplies two sums of k terms.
    tolerance={
        "f32": Tolerance(4e-5, 2e-5),
        "bf16": BF16,
        "f8g128": F8,
        "x_f8g128.f32": Tolerance(2 * F8_SUMS.rtol, 2 * F8_SUMS.atol),
        "x_f8g128.bf16": Tolerance(BF16.rtol, 2 * F8_SUMS.atol),
        "x_f8g128.f8g128": Tolerance(F8.rtol, 2 * F8_SUMS.atol),
    },
)
