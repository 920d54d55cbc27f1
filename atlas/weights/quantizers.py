"""From float matrices to `QuantizedArray`: the formats of load-time quantisation and of `atlas.quantize`.

Each format has one definition. Scales are rounded to the dtype in which they will be stored, and each code is the
nearest to its value under that *stored* scale. For 4-bit integers the scale is searched: a few ranges around the
group's own are tried, each with its least-squares scale, and the one with the smallest squared error is kept (the
range that ends at the largest value is rarely the best of 16 levels).

Work goes in chunks that stay in the cache, transposed to [size, groups], so that every reduction over a group is
an addition of vectors. Values that are not finite are refused by name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import ml_dtypes
import numpy as np

from atlas.errors import BuildError, CheckpointError
from atlas.targets.formats import FORMATS, GROUP
from atlas.weights.e4m3 import round_rows
from atlas.weights.quantized import E2M1, Array, QuantizedArray

Scheme4 = Literal["symmetric", "zero", "minimum"]

SCALE_DTYPES: dict[str, tuple[np.dtype[Any], ...]] = {
    "f16": (np.dtype(np.float16),),
    "bf16": (np.dtype(ml_dtypes.bfloat16),),
    "f16+bf16": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)),
    "f32": (np.dtype(np.float32),),
}
"""Name -> the roundings that scales go through; "f16+bf16" leaves what both hold, so that no reader rounds again."""

E4M3_MAX, E2M1_MAX = 448.0, 6.0
FP8_BLOCK = 128
NVFP4_GROUP = 16

_CHUNK = 1 << 16
"""Elements quantised at a time: 256 KB of float32, so that a chunk and its temporaries stay in a core's cache."""

_RANGES = (1.05, 1.0, 0.93, 0.86, 0.79, 0.72)
"""Ranges that the 4-bit search tries, as fractions of the group's own. Mean squared error on N(0,1), symmetric, groups
of 32 / 128: 1 range .00706 / .01036, these 6 .00669 / .00941, 9 ranges .00665 / .00937 at 1.5 times the time."""

_E2M1_STEPS: tuple[tuple[float, bool], ...] = tuple(
    ((low + high) / 2, index % 2 == 1) for index, (low, high) in enumerate(itertools.pairwise(E2M1))
)
"""(threshold, whether the threshold itself rounds up) between neighbouring magnitudes: ties go to the even code."""


class _Groups(NamedTuple):
    """Quantised groups: codes [size, groups] as float32, scales and offsets [groups] as stored."""

    codes: Array
    scales: Array
    offsets: Array | None = None


class _Chunk(NamedTuple):
    """Groups to quantise: x float32 [size, groups], absolute maxima [groups], weight of each squared error or None."""

    x: Array
    absmax: Array
    importance: Array | None


def quantize_rows(values: Array, format: str, name: str = "weight") -> QuantizedArray:
    """A float matrix in one of the block formats that are made at load.

    Args:
        values: [rows, k], float32 (or what converts to it exactly).
        format: "i8g32", "i4g32", "i4g32b", "i4g32m", "f8", "f8g128" or "nvfp4" (atlas/targets/formats.py).
        name: of the tensor, for errors.

    Raises:
        CheckpointError: a value is not finite, or a scale does not fit f16.
        BuildError: another format.
    """
    if format == "i8g32":
        return quantize_int8(values, GROUP, "f16", name)
    if format == "i4g32":
        return quantize_int4(values, GROUP, "symmetric", "f16", name)
    if format == "i4g32b":
        return quantize_int4(values, GROUP, "symmetric", "bf16", name)
    if format == "i4g32m":
        return quantize_int4(values, GROUP, "minimum", "f16", name)
    if format in ("f8", "f8g128"):
        return _fp8_rows(values, format, name)
    if format == "nvfp4":
        return _nvfp4_rows(values, name)
    raise BuildError(
        f"format {format}", "nothing quantises floats to it", "i8g32, i4g32, i4g32b, i4g32m, f8, f8g128, nvfp4"
    )


def _fp8_rows(values: Array, format: str, name: str) -> QuantizedArray:
    """The rounding of activations, for weights too, as op load_rows has it: a GPU makes both by one arithmetic."""
    rows, k = np.asarray(values, np.float32), values.shape[1]
    codes, scales = round_rows(rows, FORMATS[format])
    if not np.isfinite(scales).all():
        refuse(rows, 0, 0, name)
    return QuantizedArray("e4m3", codes[:, :k], scales, (1, FORMATS[format].group or max(k, 1)))


def _nvfp4_rows(values: Array, name: str) -> QuantizedArray:
    """As `quantize_nvfp4`, but each row has its own global scale, so that a run of rows needs no other rows."""
    limit = np.float32(E2M1_MAX * E4M3_MAX)
    absmax = np.abs(values).max(axis=1, initial=0).astype(np.float32)
    usable = np.isfinite(absmax) & (absmax >= limit * np.finfo(np.float32).tiny)
    shared = np.where(usable, absmax / limit, np.float32(1)).astype(np.float32)
    array = quantize_nvfp4(np.asarray(values, np.float32) / shared[:, None], name, absmax=float(limit))
    return dataclasses.replace(array, row_scales=shared)


def quantize_int8(values: Array, size: int = 0, scale_dtype: str = "f32", name: str = "weight") -> QuantizedArray:
    """int8 codes in -127..127, value = code * scale, scale = absmax / 127 of each group (GGUF Q8_0's for groups of 32).

    size: columns that share a scale; 0 is the whole row (per output channel).
    """

    def quantize(chunk: _Chunk) -> _Groups:
        scales = _store(chunk.absmax / np.float32(127), scale_dtype, name)
        return _Groups(_round(chunk.x / _divisor(scales), -127, 127), scales)

    codes, scales, _ = _by_group(values, size, np.dtype(np.int8), name, quantize)
    return QuantizedArray("i8", codes, scales, (1, size or codes.shape[1]))


def quantize_int4(
    values: Array,
    size: int,
    scheme: Scheme4 = "symmetric",
    scale_dtype: str = "f16",
    name: str = "weight",
    importance: Array | None = None,
) -> QuantizedArray:
    """4-bit codes 0..15 in groups of `size` columns, scale searched for the smallest squared error.

    scheme: "symmetric", value = (code - 8) * scale, where the scale's sign puts the largest value at code 0 if that
    helps (GGUF Q4_0's trick); "zero", value = (code - zero) * scale with an integer zero in 1..15 (AWQ, GPTQ; 0 is left
    out because GPTQ stores zero - 1); "minimum", value = code * scale + minimum, both stored in the scale's dtype
    (GGUF Q4_1).
    importance: [k], what the squared error of each column counts in the search, such as its input's mean square.
    """
    search = {"symmetric": _symmetric4, "zero": _zero4, "minimum": _minimum4}[scheme]

    def quantize(chunk: _Chunk) -> _Groups:
        return search(chunk, lambda scales: _store(scales, scale_dtype, name))

    codes, scales, offsets = _by_group(values, size, np.dtype(np.uint8), name, quantize, importance)
    if scheme == "symmetric":
        return QuantizedArray("u4", codes, scales, (1, size), np.full(scales.shape, 8, np.int16))
    if scheme == "zero":
        assert offsets is not None
        return QuantizedArray("u4", codes, scales, (1, size), offsets.astype(np.int16))
    return QuantizedArray("u4", codes, scales, (1, size), None, offsets)


def quantize_fp8(values: Array, group: tuple[int, int], name: str = "weight", absmax: float = 0.0) -> QuantizedArray:
    """E4M3 codes (float8_e4m3fn), value = code * scale, scale = absmax / 448 of each group in float32.

    group: rows and columns that share a scale, 0 for all of them: (0, 0) per tensor, (1, 0) per output channel,
    (128, 128) in blocks, whose last ones may be partial. A group of zeros has scale 1: some readers divide by it.
    absmax: where several tensors share one scale (group (0, 0) only), the largest value of all of them.
    """
    n, k = values.shape
    rows, columns = group[0] or max(n, 1), group[1] or max(k, 1)
    codes = np.empty((n, k), ml_dtypes.float8_e4m3fn)
    scales = np.empty((-(-n // rows), -(-k // columns)), np.float32)
    for index, row in enumerate(range(0, n, rows)):
        part = np.asarray(values[row : row + rows], np.float32)
        largest = np.maximum.reduceat(np.abs(part).max(axis=0), np.arange(0, k, columns))
        if not np.isfinite(largest).all():
            refuse(part, row, 0, name)
        if absmax:
            largest = np.full_like(largest, absmax)
        scale = np.where(largest == 0, np.float32(1), np.maximum(largest / np.float32(E4M3_MAX), _TINY))
        scaled = part / np.repeat(scale, columns)[:k]
        codes[row : row + rows] = np.clip(scaled, -E4M3_MAX, E4M3_MAX, out=scaled).astype(codes.dtype)
        scales[index] = scale
    return QuantizedArray("e4m3", codes, scales, (rows, columns))


_TINY = np.float32(2.0**-149)
"""The smallest positive float32: the scale of values so small that theirs would be zero."""


def quantize_nvfp4(
    values: Array, name: str = "weight", absmax: float = 0.0, *, reciprocal: bool = False
) -> QuantizedArray:
    """E2M1 codes, an E4M3 scale per 16 columns and one float32 scale: value = code * scale * global.

    global = absmax / (6 * 448); a group's scale = its absmax / (6 * global), rounded to E4M3.
    absmax: where several tensors share the global scale, the largest value of all of them; 0 takes this tensor's.
    reciprocal: the file will hold 1 / global; so that both mean the same, global is the reciprocal of that float32.
    """
    absmax = absmax or float(np.abs(values).max(initial=0))
    limit = np.float32(E2M1_MAX * E4M3_MAX)
    # Of zeros, or of values so small that the quotient is no float32.
    usable = np.isfinite(absmax) and np.float32(absmax) >= limit * np.finfo(np.float32).tiny
    shared = 1.0
    if usable:
        shared = 1 / float(limit / np.float32(absmax)) if reciprocal else float(np.float32(absmax) / limit)

    def quantize(chunk: _Chunk) -> _Groups:
        raw = np.minimum(chunk.absmax / np.float32(E2M1_MAX * shared), np.float32(E4M3_MAX))
        scales = raw.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        # As `dequantize` multiplies them: in double precision, rounded once.
        steps = (scales.astype(np.float64) * shared).astype(np.float32)
        return _Groups(e2m1_codes(chunk.x / _divisor(steps)), scales)

    codes, scales, _ = _by_group(values, NVFP4_GROUP, np.dtype(np.uint8), name, quantize)
    return QuantizedArray("e2m1", codes, scales, (1, NVFP4_GROUP), global_scale=shared)


def e2m1_codes(x: Array) -> Array:
    """Codes 0..15 of the nearest E2M1 values, ties to the even code; beyond 6 is 6. uint8, of x's shape."""
    magnitude = np.abs(x)
    codes = np.zeros(x.shape, np.uint8)
    for threshold, up in _E2M1_STEPS:
        codes += magnitude >= threshold if up else magnitude > threshold
    return codes | (np.signbit(x).view(np.uint8) << 3)


# ---- 4-bit integers: the search over one chunk ---------------------------------------------------


def _symmetric4(chunk: _Chunk, store: Callable[[Array], Array]) -> _Groups:
    x, absmax, importance = chunk
    unit = x / _divisor(absmax)
    # The largest value, with its sign, goes to code 0, which reaches one step further than code 15.
    ends = np.where(unit.max(axis=0) >= 1, np.float32(-1 / 8), np.float32(1 / 8))
    # What the search adds up is exact for groups of 32, in any order: a GPU finds the same scales (op load_rows).
    grid = np.rint(unit * np.float32(2**14)) * np.float32(2**-14)
    best = _Best(len(absmax))
    for fraction in _RANGES:
        codes = _round(unit * (1 / (ends * np.float32(fraction))), -8, 7)
        best.offer(*_fit(codes, grid, importance))
    scales = store(best.scales * absmax)
    return _Groups(_round(x / _divisor(scales), -8, 7) + 8, scales)


def _zero4(chunk: _Chunk, store: Callable[[Array], Array]) -> _Groups:
    x, absmax, importance = chunk
    unit = x / _divisor(absmax)
    low, high = np.minimum(unit.min(axis=0), 0), np.maximum(unit.max(axis=0), 0)
    best, zeros = _Best(len(absmax)), np.ones_like(absmax)
    for fraction in _RANGES:
        step = _divisor((high - low) * np.float32(fraction / 15))
        zero = _round(-low * np.float32(fraction) / step, 1, 15)
        codes = _round(unit / step + zero, 0, 15) - zero
        better = best.offer(*_fit(codes, unit, importance))
        zeros[better] = zero[better]
    scales = store(best.scales * absmax)
    return _Groups(_round(np.rint(x / _divisor(scales)) + zeros, 0, 15), scales, zeros)


def _minimum4(chunk: _Chunk, store: Callable[[Array], Array]) -> _Groups:
    x, absmax, importance = chunk
    unit = x / _divisor(absmax)
    low, high = unit.min(axis=0), unit.max(axis=0)
    middle = (low + high) / 2
    best, minimums = _Best(len(absmax)), np.zeros_like(absmax)
    # Around the mean all sums are small, so that float32 holds the differences that matter.
    mean = _mean(unit, importance)
    centred = unit - mean
    for fraction in _RANGES:
        step = (high - low) * np.float32(fraction / 15)
        codes = _round((unit - middle) / _divisor(step) + np.float32(7.5), 0, 15)
        code_mean = _mean(codes, importance)
        gain, scale = _fit(codes - code_mean, centred, importance)
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


def _fit(codes: Array, x: Array, importance: Array | None) -> tuple[Array, Array]:
    """The least-squares scale of x ~ codes * scale, and by how much it lowers the (weighted) squared error."""
    weighted = codes if importance is None else codes * importance
    dot = np.einsum("kg,kg->g", weighted, x)
    scale = dot / _divisor(np.einsum("kg,kg->g", weighted, codes))
    return dot * scale, scale


def _mean(x: Array, importance: Array | None) -> Array:
    """Of each group, [groups]."""
    if importance is None:
        return cast(Array, x.mean(axis=0))
    return cast(Array, np.einsum("kg,kg->g", x, importance) / importance.sum(axis=0))


# ---- shared --------------------------------------------------------------------------------------


def _by_group(
    values: Array,
    size: int,
    code: np.dtype[Any],
    name: str,
    quantize: Callable[[_Chunk], _Groups],
    importance: Array | None = None,
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
            absmax = np.abs(np.maximum(x.max(axis=0), -x.min(axis=0)))  # of zeros, no negative zero
            if not np.isfinite(absmax).all():
                refuse(part, row, begin, name)
            weights = None
            if importance is not None:
                weights = np.tile(np.asarray(importance[begin:end], np.float32).reshape(-1, columns).T, rows)
            done = quantize(_Chunk(x, absmax, weights))
            at = (slice(row, row + rows), slice(begin // size, -(-end // size)))
            codes[row : row + rows, begin:end] = done.codes.astype(code, copy=False).T.reshape(rows, -1)
            scales[at] = done.scales.reshape(rows, -1)
            if done.offsets is not None:
                offsets = np.empty_like(scales) if offsets is None else offsets
                offsets[at] = done.offsets.reshape(rows, -1)
    return codes, scales, offsets


def refuse(part: Array, row: int, column: int, name: str) -> None:
    """Raise the error of a value that is not finite, if `part` has one.

    row, column: where the part begins in tensor `name`.
    """
    bad = np.argwhere(~np.isfinite(part))
    if not len(bad):
        return
    first = part[tuple(bad[0])]
    raise CheckpointError(
        f"tensor {name}",
        f"{first} at row {row + bad[0][0]}, column {column + bad[0][1]}",
        "finite values",
        "the checkpoint is damaged: download it again, or keep this tensor unquantised",
    )


def _store(scales: Array, dtype: str, name: str) -> Array:
    """Scales rounded to the dtype that stores them, as float32; what is not zero stays so."""
    rounded = scales
    for stored in SCALE_DTYPES[dtype]:
        with np.errstate(over="ignore"):
            rounded = rounded.astype(stored).astype(np.float32)
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
