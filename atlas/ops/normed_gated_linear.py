"""normed_gated_linear: gated_linear of rows of op residual_linear, yet to be divided by their root mean square."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.gated_activation import activate
from atlas.ops.gated_linear import GATED_LINEAR
from atlas.ops.lazy import np
from atlas.ops.normed_linear import SQUARES, normed_product
from atlas.ops.op import Arrays, Constants, Op


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """out = act(x Wg^T / rms + bg) * (x Wu^T / rms + bu), rms = sqrt(sum_b squares[r, b]), as op gated_linear."""
    rows = dims["rows"]
    gate, up = np.split(normed_product(arrays, rows), 2, axis=-1)
    arrays["out"][:rows] = activate(gate, int(constants["activation"])) * up


NORMED_GATED_LINEAR = Op(
    name="normed_gated_linear",
    operands=(*GATED_LINEAR.operands[:-1], SQUARES, GATED_LINEAR.operands[-1]),
    dims=GATED_LINEAR.dims,
    constants=GATED_LINEAR.constants,
    reference=reference,
    tolerance=GATED_LINEAR.tolerance,
)
