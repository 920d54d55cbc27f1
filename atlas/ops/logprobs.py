"""logprobs: what the model thought of a token, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.ops.lazy import np
from atlas.ops.op import EXACT, F32, Arrays, Constants, Op, Operand

MAX_TOP = 20
"""Most tokens reported for one row: what the OpenAI API allows."""


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """For each row with n_top[i] >= 0: log-softmax of the row at its token, the token's rank, and the n_top[i]
    largest with their ids.

    The token is target[i], or token[i], the sampled one, where target[i] is negative. Rank 1 is the largest; equals
    are ordered by id, in the rank and in the list. No token (INVALID_TOKEN), or a row with a NaN or without a
    finite maximum: logprob NaN, rank 0; in such a row, and past the end of the vocabulary, top entries are -1 and
    NaN. Everything else of the outputs is left alone.
    """
    vocab = int(constants["vocab"])
    for i in range(dims["logits"]):
        n_top = int(arrays["n_top"][i])
        if n_top < 0:
            continue
        token = int(arrays["target"][i])
        if token < 0:
            token = int(arrays["token"][i])
        arrays["logprob"][i], arrays["rank"][i] = np.nan, 0
        arrays["top_token"][i, :n_top], arrays["top_logprob"][i, :n_top] = -1, np.nan
        x = arrays["logits"][i].astype(np.float64)
        if np.isnan(x).any() or not np.isfinite(x.max()):
            continue
        logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
        order = np.argsort(-x, kind="stable")[: min(n_top, vocab)]
        arrays["top_token"][i, : len(order)], arrays["top_logprob"][i, : len(order)] = order, logprobs[order]
        if 0 <= token < vocab:
            arrays["logprob"][i] = logprobs[token]
            arrays["rank"][i] = 1 + (x > x[token]).sum() + (x[:token] == x[token]).sum()


LOGPROBS = Op(
    name="logprobs",
    operands=(
        Operand("logits", ("logits", "vocab"), ("f32",)),
        Operand("n_top", ("logits",), ("i32",)),
        Operand("target", ("logits",), ("i32",)),
        Operand("token", ("logits",), ("i32",)),
        Operand("logprob", ("logits",), ("f32",), "inout"),
        Operand("rank", ("logits",), ("i32",), "inout"),
        Operand("top_token", ("logits", "max_top"), ("i32",), "inout"),
        Operand("top_logprob", ("logits", "max_top"), ("f32",), "inout"),
    ),
    dims=("logits",),
    constants=("vocab", "max_top"),
    reference=reference,
    tolerance={"f32": F32, "i32": EXACT},
)
