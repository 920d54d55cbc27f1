"""moe_mlp: each row through the gated MLPs of its experts (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.gated_activation import activate
from atlas.ops.lazy import np
from atlas.ops.op import FLOAT, Arrays, Constants, Op, Operand, Tolerance


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out[r] = sum over j of expert_weight[r, j] * down_e (act(gate_e x[r]) * up_e x[r]), e = expert_id[r, j].

    `gate_up` stacks the experts' [gate | up] rows, `down` their rows. Sums are fp32; the activated values
    are rounded to the type of x, as they enter a product; a row's experts are added in the order of j.
    """
    rows, hidden, intermediate = dims["rows"], int(constants["hidden"]), int(constants["intermediate"])
    x, ids, weights = arrays["x"][:rows], arrays["expert_id"][:rows], arrays["expert_weight"][:rows]
    gate_up = arrays["gate_up"].reshape(-1, 2 * intermediate, hidden)
    down = arrays["down"].reshape(-1, hidden, intermediate)
    products = np.zeros((*ids.shape, hidden), np.float32)
    for expert in np.unique(ids):
        row, place = np.nonzero(ids == expert)
        both = x[row].astype(np.float32) @ gate_up[expert].astype(np.float32).T
        gate, up = np.split(both, 2, axis=-1)
        activated = (activate(gate, int(constants["activation"])) * up).astype(x.dtype)
        products[row, place] = activated.astype(np.float32) @ down[expert].astype(np.float32).T
    out = np.zeros((rows, hidden), np.float32)
    for j in range(ids.shape[1]):
        out += weights[:, j, None] * products[:, j]
    arrays["out"][:rows] = out


MOE_MLP = Op(
    name="moe_mlp",
    operands=(
        Operand("x", ("rows", "hidden"), FLOAT),
        Operand("gate_up", ("n_experts * 2 * intermediate", "hidden"), FLOAT),
        Operand("down", ("n_experts * hidden", "intermediate"), FLOAT),
        Operand("expert_id", ("rows", "top_k"), ("i32",)),
        Operand("expert_weight", ("rows", "top_k"), ("f32",)),
        Operand("out", ("rows", "hidden"), ("f32",), "out"),
    ),
    dims=("rows",),
    constants=("n_experts", "top_k", "hidden", "intermediate", "activation"),
    reference=reference,
    # An activated bf16 value next to a rounding boundary may fall to either side of it: 2^-8 of one of
    # `intermediate` terms.
    tolerance={"f32": Tolerance(1e-3, 1e-3)},
)
