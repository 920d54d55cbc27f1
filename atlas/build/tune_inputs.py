"""Inputs to tune a kernel on: random, never zero, and laid out as a real decode step has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from atlas.errors import BuildError
from atlas.ops.normed_logits import largest_of
from atlas.runtime.backend import Array
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.program import KernelKey
from atlas.targets.formats import Format
from atlas.weights.quantized import BlockArray, QuantizedArray, to_rows
from atlas.weights.quantizers import quantize_rows

CONTEXT = 1024
"""Tokens that each sequence of an attention case has."""

NUMPY_SCALES = {"f16": np.dtype(np.float16), "bf16": NUMPY["bf16"], "f32": np.dtype(np.float32)}
"""Dtypes of the scales of integer formats."""

_BLOCK_ROWS = 256
"""Rows of a matrix in a block format that are made; the others repeat them."""

_SAMPLES = 1 << 24
"""Random numbers drawn at most for one array; larger ones repeat them."""

Arrays = Mapping[str, Any]
"""By operand: a NumPy array, or a BlockArray in a block format."""
Maker = Callable[[KernelKey, Arrays, int, np.random.Generator], None]


def inputs(key: KernelKey, arrays: Arrays, rows: int, rng: np.random.Generator) -> None:
    """Fill an op's inputs in place, the first `rows` rows of those that have rows.

    Raises:
        BuildError: no inputs are known for the op.
    """
    if key.op not in _MAKERS:
        raise BuildError(
            f"tuning op {key.op}", "no inputs are known for it", ", ".join(_MAKERS), f"add it to {__name__}"
        )
    _MAKERS[key.op](key, arrays, rows, rng)


def _normal(array: Array | BlockArray, rng: np.random.Generator, scale: float = 1.0) -> None:
    """N(0, scale^2) in the array's dtype or format; no plain element is zero. Integer formats: random codes."""
    if isinstance(array, BlockArray):
        some = to_rows(_blocks(array.format, min(len(array), _BLOCK_ROWS), array.k, rng, scale), array.format.name)
        for begin in range(0, len(array), len(some)):
            rows = array.raw[begin : begin + len(some)]
            rows[:] = some[: len(rows)]
        return
    flat = array.reshape(-1)
    values = rng.standard_normal(min(flat.size, _SAMPLES), np.float32) * np.float32(scale)
    values[values == 0] = scale
    converted = values.astype(array.dtype)
    for begin in range(0, flat.size, converted.size):
        part = flat[begin : begin + converted.size]
        part[:] = converted[: part.size]


def _blocks(format: Format, n: int, k: int, rng: np.random.Generator, scale: float) -> QuantizedArray:
    if format.element != "integer":
        return quantize_rows(rng.standard_normal((n, k), np.float32) * np.float32(scale), format.name)
    shape = (n, format.groups(k))
    low, high = (-127, 128) if format.signed else (0, 16)
    scales = (rng.uniform(0.5, 2.0, shape) * scale * 4 / (high - low)).astype(NUMPY_SCALES[format.scale])
    middle, minimums = np.full(shape, (low + high) // 2, np.int16), None
    if format.minimum:
        minimums = (-8 * scales.astype(np.float32)).astype(NUMPY_SCALES[format.minimum]).astype(np.float32)
    return QuantizedArray(
        "i8" if format.signed else "u4",
        rng.integers(low, high, (n, k)).astype(np.int8 if format.signed else np.uint8),
        scales.astype(np.float32),
        (1, format.group),
        None if format.signed or format.minimum else middle,
        minimums,
    )


def _linear(key: KernelKey, arrays: Arrays, rows: int, rng: np.random.Generator) -> None:
    _normal(arrays["x"][:rows], rng)
    _normal(arrays["weight"], rng, float(dict(key.constants)["k"]) ** -0.5)
    if "bias" in arrays:
        _normal(arrays["bias"], rng)


def _rms_norm(key: KernelKey, arrays: Arrays, rows: int, rng: np.random.Generator) -> None:
    _normal(arrays["x"][:rows], rng)
    _normal(arrays["weight"], rng)


def _gated_activation(key: KernelKey, arrays: Arrays, rows: int, rng: np.random.Generator) -> None:
    _normal(arrays["gate_up"][:rows], rng)


def _paged_attention(key: KernelKey, arrays: Arrays, rows: int, rng: np.random.Generator) -> None:
    """Every row the last token of a sequence of CONTEXT tokens, whose blocks lie anywhere in the pool."""
    _normal(arrays["q"][:rows], rng)
    _normal(arrays["k_cache"], rng)
    _normal(arrays["v_cache"], rng)
    arrays["row_position"][:rows] = CONTEXT - 1
    arrays["row_seq"][:rows] = np.arange(rows)
    table: Any = arrays["block_table"]
    blocks = arrays["k_cache"].shape[0]
    # Every entry is a block, those of spare rows too: launches take turns over shuffles of the table.
    entries = np.concatenate([rng.permutation(blocks), rng.integers(0, blocks, max(0, table.size - blocks))])
    table[...] = entries[: table.size].reshape(table.shape)


def _sample(key: KernelKey, arrays: Arrays, rows: int, rng: np.random.Generator) -> None:
    """Half of the rows greedy, half with top-p: what servers see."""
    _normal(arrays["logits"][:rows], rng, 4.0)
    arrays["adjust"][:rows] = 0
    arrays["temperature"][:rows] = np.where(np.arange(rows) % 2, 0.0, 0.7)
    arrays["top_k"][:rows] = 0
    arrays["top_p"][:rows] = 0.95
    arrays["min_p"][:rows] = 0.0
    arrays["seed"][:rows] = rng.integers(0, 1 << 62, rows)
    arrays["position"][:rows] = rng.integers(0, CONTEXT, rows)
    arrays["slot"][:rows] = -1


def _sample_largest(key: KernelKey, arrays: Arrays, rows: int, rng: np.random.Generator) -> None:
    _sample(key, arrays, rows, rng)
    arrays["largest"][:rows], arrays["largest_id"][:rows] = largest_of(arrays["logits"][:rows])


def _residual_rms_norm(key: KernelKey, arrays: Arrays, rows: int, rng: np.random.Generator) -> None:
    _normal(arrays["x"][:rows], rng)
    _normal(arrays["residual"][:rows], rng)
    _normal(arrays["weight"], rng)


_MAKERS: dict[str, Maker] = {
    "linear": _linear,
    "gated_linear": _linear,
    "rms_norm": _rms_norm,
    "residual_rms_norm": _residual_rms_norm,
    "gated_activation": _gated_activation,
    "paged_attention": _paged_attention,
    "sample": _sample,
    "sample_largest": _sample_largest,
}
