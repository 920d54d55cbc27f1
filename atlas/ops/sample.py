"""sample: one token per row of logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.ops.adjust_logits import ADJUST_PENALTIES
from atlas.ops.lazy import np
from atlas.ops.op import EXACT, Arrays, Constants, Op, Operand

INVALID_TOKEN = -1
"""Reported for a row whose logits hold a NaN or have no finite maximum: never sampled."""


def philox4x32(counter: int, key: int) -> int:
    """First word of Philox-4x32-10 (Salmon et al., SC'11) for counter (counter, 0, 0, 0) and a 64-bit key."""
    c = [counter & 0xFFFFFFFF, 0, 0, 0]
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (product1 >> 32) ^ c[1] ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c[3] ^ k1,
            product0 & 0xFFFFFFFF,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0]


def uniform(seed: int, position: int) -> float:
    """The random number in (0, 1) for the token at `position` of a request with `seed`."""
    return ((philox4x32(position, seed) >> 8) + 0.5) * 2.0**-24


def kept_probabilities(logits: Any, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
    """Unnormalised probabilities [vocab] in fp32, 1 for the largest, 0 for tokens that are left out.

    Temperature first, then top_k, then top_p over what is left, then min_p relative to the largest; ties at
    a threshold are kept.
    """
    # Subtracting first: the largest weight is 1 at any temperature above 0, however small.
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / np.float32(temperature))
    if 0 < top_k < len(weights):
        weights[logits < np.partition(logits, -top_k)[-top_k]] = 0.0
    if top_p < 1.0:
        order = np.sort(weights)[::-1]
        reached = int(np.searchsorted(np.cumsum(order, dtype=np.float64), top_p * order.sum(dtype=np.float64)))
        weights[weights < order[min(reached, len(order) - 1)]] = 0.0
    weights[weights < np.float32(min_p)] = 0.0
    return weights


def choose(logits: Any, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> int:
    """The token of one row: the first argmax at temperature 0, else the inverse CDF in id order."""
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return INVALID_TOKEN
    if temperature <= 0.0:
        return int(np.argmax(logits))
    cumulative = np.cumsum(kept_probabilities(logits, temperature, top_k, top_p, min_p), dtype=np.float64)
    return int(np.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], side="right"))


def reference(arrays: Arrays, dims: Mapping[str, int], constants: Constants) -> None:
    """token[i] for each row, chosen from adjusted[i] where adjust[i] is not 0, else from logits[i].

    last_token[slot[i]] = token[i], so that the next step can read it on the device; and where penalties apply,
    token_count[slot[i], token[i]] is one more.
    """
    for i in range(dims["logits"]):
        adjust, slot = int(arrays["adjust"][i]), int(arrays["slot"][i])
        token = choose(
            arrays["adjusted" if adjust else "logits"][i],
            float(arrays["temperature"][i]),
            int(arrays["top_k"][i]),
            float(arrays["top_p"][i]),
            float(arrays["min_p"][i]),
            int(arrays["seed"][i]) & 0xFFFFFFFFFFFFFFFF,
            int(arrays["position"][i]),
        )
        arrays["token"][i] = token
        if slot >= 0:
            arrays["last_token"][slot] = token
            if adjust & ADJUST_PENALTIES and token != INVALID_TOKEN:
                arrays["token_count"][slot, token] += 1


SAMPLE = Op(
    name="sample",
    operands=(
        Operand("logits", ("logits", "vocab"), ("f32",)),
        Operand("adjusted", ("logits", "vocab"), ("f32",)),
        Operand("adjust", ("logits",), ("i32",)),
        Operand("temperature", ("logits",), ("f32",)),
        Operand("top_k", ("logits",), ("i32",)),
        Operand("top_p", ("logits",), ("f32",)),
        Operand("min_p", ("logits",), ("f32",)),
        Operand("seed", ("logits",), ("i64",)),
        Operand("position", ("logits",), ("i32",)),
        Operand("slot", ("logits",), ("i32",)),
        Operand("token", ("logits",), ("i32",), "out"),
        Operand("last_token", ("slots",), ("i32",), "inout"),
        Operand("token_count", ("slots", "vocab"), ("i32",), "inout"),
    ),
    dims=("logits", "slots"),
    constants=("vocab",),
    reference=reference,
    tolerance={"i32": EXACT},
)
