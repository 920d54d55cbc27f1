"""sample_largest: sample, of logits that normed_logits left."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops import sample
from atlas.ops.lazy import np
from atlas.ops.normed_logits import OF
from atlas.ops.op import Arrays, Constants, Op, Operand

_GROUPS = f"ceil_div(vocab, {OF})"


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """As sample, but for greedy rows that are not adjusted: the id of the first of their largest logits."""
    count = dims["logits"]
    logits = np.array(arrays["logits"][:count])
    for i in range(count):
        if arrays["temperature"][i] > 0 or arrays["adjust"][i] != 0:
            continue
        logits[i] = -np.inf
        logits[i, arrays["largest_id"][i]] = arrays["largest"][i]
    sample.reference({**arrays, "logits": logits}, dims, constants)


SAMPLE_LARGEST = Op(
    name="sample_largest",
    operands=(
        sample.SAMPLE.operands[0],
        Operand("largest", ("logits", _GROUPS), ("f32",)),
        Operand("largest_id", ("logits", _GROUPS), ("i32",)),
        *sample.SAMPLE.operands[1:],
    ),
    dims=sample.SAMPLE.dims,
    constants=sample.SAMPLE.constants,
    reference=reference,
    tolerance=sample.SAMPLE.tolerance,
)
