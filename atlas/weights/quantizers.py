"""From float matrices to `QuantizedArray`: the integer schemes of load-time quantisation and `atlas.quantize`.

Every scheme has one definition: groups of `size` columns share a scale, the scale is rounded to the dtype in
which it will be stored, and each code is the nearest to its value under that *stored* scale. For 4 bits the
scale is searched: a few ranges around the group's own are tried, each with its least-squares scale, and the one
with the smallest squared error is kept (the range that ends at the largest value is rarely the best of 16 levels).

Work goes in chunks that stay in the cache, transposed to [size, groups], so that every reduction over a group is
an addition of vectors. Values that are not finite are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from atlas.errors import BuildError, CheckpointError
from atlas.targets.formats import GROUP
from atlas.weights.quantized import Array, QuantizedArray

SCALE_DTYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
}

_CHUNK = 1 << 16
"""Elements quantised at a time: 256 KB of float32, so that a chunk and its temporaries stay in a core's cache."""

_RANGES = (1.05, 1.0, 0.93, 0.86, 0.79, 0.72)
"""Ranges that the 4-bit search tries, as fractions of the group's own. Mean squared error on N(0,1), symmetric, groups
of 32 / 128: 1 range .00706 / .01036, these 6 .00669 / .00941, 9 ranges .00665 / .00937 at 1.5 times the time."""


class _Groups(NamedTuple):
    """Quantised groups: codes [size, groups] as float32, scales and offsets [groups] as stored."""

    codes: Array
    scales: Array
    offsets: Array | None


_Quantizer = Callable[[Array, Array], _Groups]
"""x float32 [size, groups] and its absolute maxima [groups] -> the quantised groups."""


def quantize_rows(values: Array, format: str, name: str = "weight") -> QuantizedArray:
    """A float matrix in one of the block formats that are made at load.

    Args:
        values: [rows, k], float32 (or what converts to it exactly).
        format: "i8g32", "i4g32" or "i4g32m" (atlas/targets/formats.py).
        name: of the tensor, for errors.

    Raises:
        CheckpointError: a value is not finite, or a scale does not fit f16.
        BuildError: another format.
    """
    if format == "i8g32":
        return quantize_int8(values, GROUP, "f16", name)
    if format == "i4g32":
        return quantize_int4(values, GROUP, "symmetric", "f16", name)
    if format == "i4g32m":
        return quantize_int4(values, GROUP, "minimum", "f16", name)
    raise BuildError(f"format {format}", "nothing quantises floats to it", "i8g32, i4g32, i4g32m")


def quantize_int8(values: Array, size: int = 0, scale_dtype: str = "f32", name: str = "weight") -> QuantizedArray:
    """int8 codes in -127..127, value = code * scale, scale = absmax / 127 of each group (GGUF Q8_0's for groups of 32).

    size: columns that share a scale; 0 is the whole row (per output channel).
    """

    def quantize(x: Array, absmax: Array) -> _Groups:
        scales = _store(absmax / np.float32(127), scale_dtype, name)
        codes = np.divide(x, _divisor(scales))
        return _Groups(_round(codes, -127, 127), scales, None)

    codes, scales, _ = _by_group(values, size, np.dtype(np.int8), name, quantize)
    return QuantizedArray("i8", codes, scales, (1, size or codes.shape[1]))


def quantize_int4(
    values: Array, size: int, scheme: str = "symmetric", scale_dtype: str = "f16", name: str = "weight"
) -> QuantizedArray:
    """4-bit codes 0..15 in groups of `size` columns, scale searched for the smallest squared error.

    scheme: "symmetric", value = (code - 8) * scale, where the scale's sign puts the largest value at code 0 if that
    helps (GGUF Q4_0's trick); "zero", value = (code - zero) * scale with an integer zero in 1..15 (AWQ, GPTQ; 0 is left
    out because GPTQ stores zero - 1);
    "minimum", value = code * scale + minimum, both stored in the scale's dtype (GGUF Q4_1).
    """
    search = {"symmetric": _symmetric4, "zero": _zero4, "minimum": _minimum4}[scheme]

    def quantize(x: Array, absmax: Array) -> _Groups:
        return search(x, absmax, lambda scales: _store(scales, scale_dtype, name))

    codes, scales, offsets = _by_group(values, size, np.dtype(np.uint8), name, quantize)
    zeros = offsets.astype(np.int16) if scheme == "zero" and offsets is not None else None
    if scheme == "symmetric":
        zeros = np.full(scales.shape, 8, np.int16)
    return QuantizedArray("u4", codes, scales, (1, size), zeros, offsets if scheme == "minimum" else None)


# ---- 4 bits: the search over one chunk -----------------------------------------------------------


def _symmetric4(x: Array, absmax: Array, store: Callable[[Array], Array]) -> _Groups:
    unit = x / _divisor(absmax)
    # The largest value, with its sign, goes to code 0, which reaches one step further than code 15.
    ends = np.where(unit.max(axis=0) >= 1, np.float32(-1 / 8), np.float32(1 / 8))
    best = _Best(len(absmax))
    for fraction in _RANGES:
        codes = _round(unit * (1 / (ends * np.float32(fraction))), -8, 7)
        best.offer(*_fit(codes, unit))
    scales = store(best.scales * absmax)
    return _Groups(_round(x / _divisor(scales), -8, 7) + 8, scales, None)


def _zero4(x: Array, absmax: Array, store: Callable[[Array], Array]) -> _Groups:
    unit = x / _divisor(absmax)
    low, high = np.minimum(unit.min(axis=0), 0), np.maximum(unit.max(axis=0), 0)
    best, zeros = _Best(len(absmax)), np.zeros_like(absmax)
    for fraction in _RANGES:
        step = (high - low) * np.float32(fraction / 15)
        zero = _round(-low * np.float32(fraction) / _divisor(step), 1, 15)
        codes = _round(unit / _divisor(step) + zero, 0, 15) - zero
        better = best.offer(*_fit(codes, unit))
        zeros[better] = zero[better]
    scales = store(best.scales * absmax)
    return _Groups(_round(np.rint(x / _divisor(scales)) + zeros, 0, 15), scales, zeros)


def _minimum4(x: Array, absmax: Array, store: Callable[[Array], Array]) -> _Groups:
    unit = x / _divisor(absmax)
    low, high = unit.min(axis=0), unit.max(axis=0)
    middle = (low + high) / 2
    best, minimums = _Best(len(absmax)), np.zeros_like(absmax)
    # Around the mean all sums are small, so that float32 holds the differences that matter.
    mean = unit.mean(axis=0)
    centred = unit - mean
    for fraction in _RANGES:
        step = (high - low) * np.float32(fraction / 15)
        codes = _round((unit - middle) / _divisor(step) + np.float32(7.5), 0, 15)
        code_mean = codes.mean(axis=0)
        gain, scale = _fit(codes - code_mean, centred)
        better = best.offer(gain, scale)
        minimums[better] = (mean - scale * code_mean)[better]
    # A constant group: no code differs, so that the minimum alone is the value.
    scales, minimums = store(best.scales * absmax), store(minimums * absmax)
    return _Groups(_round((x - minimums) / _divisor(scales), 0, 15), scales, minimums)


class _Best:
    """The best scale seen so far of each group."""

    def __init__(self, groups: int) -> None:
        self.gain = np.full(groups, -1, np.float32)
        self.scales = np.zeros(groups, np.float32)

    def offer(self, gain: Array, scales: Array) -> Array:
        """Keep `scales` where their gain is larger; returns where."""
        better = gain > self.gain
        self.gain[better], self.scales[better] = gain[better], scales[better]
        return better


def _fit(codes: Array, x: Array) -> tuple[Array, Array]:
    """The least-squares scale of x ~ codes * scale, and by how much it lowers the squared error below sum(x^2)."""
    dot = np.einsum("kg,kg->g", codes, x)
    scale = dot / _divisor(np.einsum("kg,kg->g", codes, codes))
    return dot * scale, scale


# ---- shared --------------------------------------------------------------------------------------


def _by_group(
    values: Array, size: int, code: np.dtype[Any], name: str, quantize: _Quantizer
) -> tuple[Array, Array, Array | None]:
    """Run `quantize` over the groups of [n, k]: codes [n, k], scales and offsets [n, groups]; the last may be short."""
    n, k = values.shape
    size = size or max(k, 1)
    groups, whole = -(-k // size), k // size * size
    codes = np.empty((n, k), code)
    scales = np.empty((n, groups), np.float32)
    offsets: Array | None = None
    # A tail of fewer columns is a group of its own size: padding would shift its range.
    for begin, end, columns in ((0, whole, size), (whole, k, k - whole)):
        if begin == end:
            continue
        step = max(1, _CHUNK // (end - begin))
        for row in range(0, n, step):
            part = np.asarray(values[row : row + step, begin:end], np.float32)
            rows = len(part)
            x = np.ascontiguousarray(part.reshape(-1, columns).T)
            absmax = np.maximum(x.max(axis=0), -x.min(axis=0))
            if not np.isfinite(absmax).all():
                _refuse(part, row, begin, name)
            done = quantize(x, absmax)
            at = (slice(row, row + rows), slice(begin // size, -(-end // size)))
            codes[row : row + rows, begin:end] = done.codes.astype(code).T.reshape(rows, -1)
            scales[at] = done.scales.reshape(rows, -1)
            if done.offsets is not None:
                offsets = np.empty_like(scales) if offsets is None else offsets
                offsets[at] = done.offsets.reshape(rows, -1)
    return codes, scales, offsets


def _refuse(part: Array, row: int, column: int, name: str) -> None:
    bad = np.argwhere(~np.isfinite(part))
    first = part[tuple(bad[0])]
    raise CheckpointError(
        f"tensor {name}",
        f"{first} at row {row + bad[0][0]}, column {column + bad[0][1]}",
        "finite values",
        "the checkpoint is damaged: download it again, or keep this tensor unquantised",
    )


def _store(scales: Array, dtype: str, name: str) -> Array:
    """Scales rounded to the dtype that stores them, as float32; what is not zero stays so."""
    stored = SCALE_DTYPES[dtype]
    with np.errstate(over="ignore"):
        rounded = scales.astype(stored).astype(np.float32)
    if not np.isfinite(rounded).all():
        raise CheckpointError(
            f"tensor {name}",
            f"a scale of {np.abs(scales).max():.3g} that {dtype} cannot hold",
            f"at most {float(ml_dtypes.finfo(stored).max):.6g}",
            "keep this tensor unquantised",
        )
    # Rounding a tiny scale to zero would make its group zeros; the smallest number loses less.
    lost = (rounded == 0) & (scales != 0)
    if lost.any():
        rounded[lost] = np.copysign(float(ml_dtypes.finfo(stored).smallest_subnormal), scales[lost])
    return rounded


def _divisor(scales: Array) -> Array:
    """What to divide by: one instead of zero, whose groups are all zeros."""
    return np.where(scales == 0, np.float32(1), scales)


def _round(x: Array, low: int, high: int) -> Array:
    """To the nearest integer in low..high, half to even, in place."""
    np.rint(x, out=x)
    return np.clip(x, low, high, out=x)
