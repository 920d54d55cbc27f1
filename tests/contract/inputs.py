"""Random inputs that several ops share."""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.runtime.dtypes import NUMPY
from atlas.targets.formats import FORMATS, GROUP
from atlas.targets.shape import KV_BLOCK_SIZE
from atlas.weights.quantized import QuantizedArray
from atlas.weights.quantizers import quantize_rows
from tests.contract.harness import Case

Array = np.ndarray[Any, Any]


def normal(case: Case, operand: str, rng: np.random.Generator, scale: float = 1.0) -> Array:
    """N(0, scale^2) in the operand's dtype, live part only."""
    values = rng.standard_normal(case.shape(operand, spare=False), np.float32) * np.float32(scale)
    return values.astype(NUMPY[case.dtype(operand)])


def quantized(case: Case, operand: str, rng: np.random.Generator, scale: float = 1.0) -> QuantizedArray:
    """N(0, scale^2) in the operand's block format, as load and kernels round: live part only."""
    format, shape = case.dtype(operand), case.shape(operand, spare=False)
    values = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return quantize_rows(values, format).to_format(format)


def values(case: Case, operand: str, rng: np.random.Generator, scale: float = 1.0) -> Array | QuantizedArray:
    """N(0, scale^2) in whatever dtype the operand has; integer formats have random codes of about 1 / sqrt(k)."""
    dtype = case.dtype(operand)
    if dtype in FORMATS and FORMATS[dtype].element == "integer":
        return blocks(case, operand, rng)
    return (quantized if dtype in FORMATS else normal)(case, operand, rng, scale)


def first_rows(array: Array | QuantizedArray, begin: int, end: int) -> Array | QuantizedArray:
    """Rows [begin, end) of either."""
    return array.rows(begin, end) if isinstance(array, QuantizedArray) else array[begin:end]


def blocks(case: Case, operand: str, rng: np.random.Generator) -> QuantizedArray:
    """A random matrix in the operand's block format: all codes, scales that make values of about 1 / sqrt(k)."""
    format, (n, k) = FORMATS[case.dtype(operand)], case.shape(operand)
    shape = (n, -(-k // GROUP))
    scales = rng.uniform(0.5, 2.0, shape) * k**-0.5 / 2 ** (format.bits - 1)
    minimums = -scales * rng.uniform(4, 12, shape)
    rounded = {"f16": np.float16, "bf16": NUMPY["bf16"], "f32": np.float32}
    zeros = rng.integers(0, 17, shape) if format.zero else np.full(shape, format.bias) if format.bias else None
    return QuantizedArray(
        "i8" if format.signed else "u4",
        rng.integers(-128, 128, (n, k)).astype(np.int8) if format.signed else rng.integers(0, 16, (n, k), np.uint8),
        scales.astype(rounded[format.scale]).astype(np.float32),
        (1, GROUP),
        None if zeros is None else zeros.astype(np.int16),
        minimums.astype(rounded[format.minimum]).astype(np.float32) if format.minimum else None,
    )


def paged(case: Case, rng: np.random.Generator) -> dict[str, Array]:
    """row_seq, row_position and block_table of a mixed step: sequences of different lengths, each
    contributing a run of rows at its end; blocks shuffled over the pool; unused table entries garbage."""
    dims = dict(case.dims)
    rows, seqs, max_blocks = dims["rows"], dims["seqs"], dims["max_blocks"]
    counts = np.ones(seqs, np.int64)
    counts += rng.multinomial(rows - seqs, np.full(seqs, 1.0 / seqs))
    lengths = np.minimum(counts + rng.integers(0, max_blocks * KV_BLOCK_SIZE, seqs), max_blocks * KV_BLOCK_SIZE)
    lengths[rng.integers(seqs)] = max(max_blocks * KV_BLOCK_SIZE, counts.max())
    needed = -(-lengths // KV_BLOCK_SIZE)
    pool = rng.permutation(dims["blocks"])
    table = np.full((seqs, max_blocks), 1 << 30, np.int32)
    taken = 0
    for seq in range(seqs):
        table[seq, : needed[seq]] = pool[taken : taken + needed[seq]]
        taken += needed[seq]
    row_seq = np.repeat(np.arange(seqs), counts)
    position = np.concatenate(
        [np.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    )
    return {
        "row_seq": row_seq.astype(np.int32),
        "row_position": position.astype(np.int32),
        "block_table": table,
    }
