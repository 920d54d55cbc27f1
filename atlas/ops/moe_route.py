"""moe_route: which experts a row goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, F32, Arrays, Constants, Op, Operand


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """expert_id = the top_k largest logits, largest first, ties to the lower index; expert_weight = their
    share of the softmax over all experts, or with `normalise` of the softmax over the chosen ones.

    A row with a NaN, or without a finite largest logit, gets experts 0, 1, .. and NaN for weights: what
    follows must not look like an answer.
    """
    rows, top_k = dims["rows"], int(constants["top_k"])
    logits = arrays["logits"][:rows].astype(np.float32)
    largest = logits.max(axis=-1, keepdims=True)
    usable = np.isfinite(largest)
    order = np.argsort(-np.where(usable, logits, np.float32(0)), axis=-1, kind="stable")[:, :top_k]
    exponentials = np.exp(logits - np.where(usable, largest, np.float32(np.nan)))
    chosen = np.take_along_axis(exponentials, order, axis=-1)
    total = chosen if constants["normalise"] else exponentials
    arrays["expert_id"][:rows] = order
    arrays["expert_weight"][:rows] = chosen / total.sum(axis=-1, keepdims=True)


MOE_ROUTE = Op(
    name="moe_route",
    operands=(
        Operand("logits", ("rows", "n_experts"), ("f32",)),
        Operand("expert_id", ("rows", "top_k"), ("i32",), "out"),
        Operand("expert_weight", ("rows", "top_k"), ("f32",), "out"),
    ),
    dims=("rows",),
    constants=("n_experts", "top_k", "normalise"),
    reference=reference,
    tolerance={"i32": EXACT, "f32": F32},
)
