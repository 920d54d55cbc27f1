"""Layouts `frag4` and `frag4_paired`: weights of 4 bits in the order in which wgmma's threads hold them.

A matrix is cut into blocks of 128 rows, a block into tiles of 64 columns. Rows past the end are zeros; columns past k
meet zeros of the other factor. A tile has 4,096 bytes of codes, then its scales (and zero points, or minimums). Of a
tile, warpgroup h has rows 64 h.., its warp w 16 of them, and lane 4 g + t of a warp rows g and g + 8. Each lane has 16
bytes, a word for every 16 columns, with 8 codes: of row g + 8 i, column 8 c + 2 t + e. Bits of a word, by register
p = i + 2 c and e:

    integers   code (p, e) in bits 4 p .. 4 p + 3 of half e
    i4g32b     sign s and number m of code - 8 = (-1)^s (m + 1/2) - 1/2, in bits that one instruction brings to those of
               a bf16 number that is linear in them: `_HALF_STEP_BITS`
    E2M1       bits that become sign, exponent and mantissa of bf16 by few instructions: `_E2M1_BITS`

Scales and what else a group has lie by [h][w][g][i][group of the tile]. E2M1's scales are stored as numbers of 5
exponent and 3 mantissa bits (`scale_bytes`), a row's four in the bits of a word that `_turned` says; the f32 row scales
follow the tiles of a block, 512 bytes. kernels/h200/include/atlas/four_bit.cuh is the other side.

`frag4_paired` is `frag4` of a matrix [gate; up] whose rows are rearranged: block b has, for q = 0..7, gate rows
64 b + 8 q .. + 7 and then the up rows of the same numbers, so that a lane holds both of a pair.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from atlas.errors import BuildError
from atlas.targets.formats import FORMATS, Format
from atlas.weights.quantized import BlockArray, QuantizedArray, code_of, to_rows

Array = np.ndarray[Any, Any]

ROWS, COLUMNS = 128, 64
_CODE_BYTES = ROWS * COLUMNS // 2
_DTYPES = {"f16": "<f2", "bf16": ml_dtypes.bfloat16, "e4m3": np.uint8}

_INTEGER_BITS = tuple(tuple(16 * e + 4 * p + b for b in range(4)) for e in range(2) for p in range(4))
_HALF_STEP_BITS = tuple(
    # m, then the sign. Bits 4, 5, 6 and 15 of the half are those of register 0, times 16 those of 1; with the bytes
    # of each half exchanged, those of 2 and 3.
    tuple(bit + 16 * e for bit in bits)
    for e in range(2)
    for bits in ((4, 5, 6, 15), (0, 1, 2, 11), (12, 13, 14, 7), (8, 9, 10, 3))
)
_HALF_STEPS = np.array([code ^ (15 if code < 8 else 8) for code in range(16)], np.uint8)  # of each code: s m
_E2M1_BITS = tuple(
    # Mantissa, low and high exponent bit, sign. A right rotation by 0, 3 or 6 brings those of registers 0 to 2 to
    # bits 6, 7, 8 and 15 of their half; a multiplication by 2^3 + 2^8 + 2^14 those of register 3.
    tuple((bit + 16 * e) % 32 for bit in bits)
    for e in range(2)
    for bits in ((6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (3, 4, 0, 1))
)


def accepted(name: str) -> Format:
    """The format called `name`, if there is a layout of it."""
    formats = {f.name: f for f in FORMATS.values() if f.bits == 4 and f.scale in _DTYPES}
    if name not in formats:
        raise BuildError("layout frag4", f"format {name or 'unknown'}", ", ".join(formats))
    return formats[name]


def tile_bytes(format: Format) -> int:
    """Bytes of one tile: 128 rows by 64 columns."""
    return _CODE_BYTES + ROWS * (COLUMNS // format.group) * _group_bytes(format)


def block_bytes(format: Format, k: int) -> int:
    """Bytes of 128 rows."""
    return -(-k // COLUMNS) * tile_bytes(format) + 4 * ROWS * format.row_scale


def paired_rows(n: int) -> Array:
    """Rows of [gate; up], each n / 2, in the order of `frag4_paired`: int64 [blocks * 128], -1 where there is none."""
    inner = n // 2
    packed = np.arange(-(-inner // 64) * ROWS)
    row = 64 * (packed // ROWS) + 8 * (packed % ROWS // 16) + packed % 8
    return np.where(row < inner, row + packed // 8 % 2 * inner, -1)


def pack(array: QuantizedArray, format: Format, order: Array | None = None) -> Array:
    """The stored form of `array.to_format(format.name)`: uint8 [blocks, block_bytes].

    order: which row stands at each packed row, -1 for zeros; by default each at its own.
    """
    blocks = array.to_format(format.name)
    n, k = len(blocks.codes), blocks.codes.shape[1]
    if order is None:
        order = np.arange(-(-n // ROWS) * ROWS)
        order[n:] = -1
    tiles = -(-k // COLUMNS)

    def rows(values: Array, columns: int) -> Array:
        """In packed order, `columns` wide, filled up with zeros."""
        result = np.zeros((len(order), columns), values.dtype)
        used = order >= 0
        result[used, : values.shape[1]] = values[order[used]]
        return result

    codes = rows(blocks.codes.view(np.uint8) ^ _zero_code(format), tiles * COLUMNS) ^ _zero_code(format)
    fields = [_pack_codes(codes if format.name != "i4g32b" else _HALF_STEPS[codes], tiles, _bits(format))]
    groups = tiles * (COLUMNS // format.group)
    for values in _group_fields(blocks, format):
        fields.append(_pack_groups(rows(values, groups), tiles))
    if format.element == "e2m1":
        fields[1] = _turned(fields[1], 4)
    packed = np.concatenate(fields, axis=2).reshape(len(order) // ROWS, -1)
    if blocks.row_scales is None:
        return packed
    factors = rows(blocks.row_scales.astype("<f4")[:, None], 1).reshape(-1, ROWS)
    return np.concatenate([packed, factors.view(np.uint8)], axis=1)


def unpack(raw: Array, n: int, k: int, format: Format, order: Array | None = None) -> BlockArray:
    """The matrix [n, k] from its stored form, row-major."""
    tiles, per_tile = -(-k // COLUMNS), COLUMNS // format.group
    blocks = raw.reshape(-1).view(np.uint8).reshape(-1, block_bytes(format, k))
    places = np.arange(len(blocks) * ROWS) if order is None else order
    where = np.empty(n, np.int64)
    where[places[(places >= 0) & (places < n)]] = np.flatnonzero((places >= 0) & (places < n))
    body = blocks[:, : tiles * tile_bytes(format)].reshape(len(blocks), tiles, -1)
    codes = _unpack_codes(body[:, :, :_CODE_BYTES], _bits(format))[where]
    if format.name == "i4g32b":
        codes = np.argsort(_HALF_STEPS).astype(np.uint8)[codes]
    position, fields = _CODE_BYTES, []
    for dtype in _field_dtypes(format):
        size = ROWS * per_tile * dtype.itemsize
        part = np.ascontiguousarray(body[:, :, position : position + size]).view(dtype)
        if format.element == "e2m1":
            part = _turned(part, 28)
        fields.append(_unpack_groups(part, per_tile)[where][:, : format.groups(k)])
        position += size
    scales, zeros, minimums, factors = fields[0], None, None, None
    if format.element == "e2m1":
        scales = scale_values(scales)
        tail = np.ascontiguousarray(blocks[:, tiles * tile_bytes(format) :]).view("<f4")
        factors = tail.reshape(-1)[where]
    if format.zero:
        zeros = fields[1].astype(np.int16)
    elif format.bias:
        zeros = np.full(scales.shape, format.bias, np.int16)
    if format.minimum:
        minimums = fields[1].astype(np.float32)
    array = QuantizedArray(
        code_of(format),
        codes[:, :k],
        scales.astype(np.float32),
        (1, format.group),
        zeros,
        minimums,
        row_scales=factors,
    )
    return BlockArray(to_rows(array, format.name), format, k)


def scale_bytes(scales: Array) -> Array:
    """Positive E4M3 numbers as bytes of (1 + m / 8) 2^(e - 10), with e of 5 bits above m of 3. 0 becomes byte 0, the
    smallest number: its codes are zeros."""
    mantissa, exponent = np.frexp(scales.astype(np.float32))
    number: Array = ((exponent - 1 + 10) << 3 | np.rint((mantissa * 2 - 1) * 8).astype(np.int32)).astype(np.uint8)
    number[scales == 0] = 0
    return number


def scale_values(stored: Array) -> Array:
    """The inverse of `scale_bytes`, float32."""
    number = stored.astype(np.int32)
    values: Array = np.ldexp(1 + (number & 7) / np.float32(8), (number >> 3) - 10).astype(np.float32)
    values[number == 0] = 0
    return values


# ---- one array at a time -------------------------------------------------------------------------


def _zero_code(format: Format) -> np.uint8:
    """The code of padding, so that it is zero with a scale of zero and without."""
    return np.uint8(format.bias)


def _bits(format: Format) -> tuple[tuple[int, ...], ...]:
    if format.name == "i4g32b":
        return _HALF_STEP_BITS
    return _E2M1_BITS if format.element == "e2m1" else _INTEGER_BITS


def _group_fields(blocks: QuantizedArray, format: Format) -> list[Array]:
    """What each group has, as it is stored: [n, groups] each."""
    if format.element == "e2m1":
        return [scale_bytes(blocks.scales)]
    if format.name == "i4g32b":
        most = np.abs(blocks.scales[np.isfinite(blocks.scales)]).max(initial=0)
        if most >= 2**30:
            raise BuildError("layout frag4", f"a scale of {most:g}", "less than 2^30")
    fields = [blocks.scales.astype(_DTYPES[format.scale])]
    if format.zero:
        assert blocks.zeros is not None
        if blocks.zeros.max(initial=0) > 127:
            raise BuildError("layout frag4", f"a zero point of {blocks.zeros.max()}", "at most 127")
        fields.append(blocks.zeros.astype(np.uint8))
    if format.minimum:
        assert blocks.minimums is not None
        fields.append(blocks.minimums.astype(_DTYPES[format.minimum]))
    return fields


def _field_dtypes(format: Format) -> list[np.dtype[Any]]:
    dtypes: list[Any] = [_DTYPES[format.scale]]
    if format.zero:
        dtypes.append(np.uint8)
    if format.minimum:
        dtypes.append(_DTYPES[format.minimum])
    return [np.dtype(dtype) for dtype in dtypes]


def _group_bytes(format: Format) -> int:
    return sum(dtype.itemsize for dtype in _field_dtypes(format))


def _pack_codes(codes: Array, tiles: int, bits: tuple[tuple[int, ...], ...]) -> Array:
    """uint8 [rows, tiles * 64] of codes -> uint8 [blocks, tiles, 4096]."""
    # [block, h, w, i, g][tile, step, c, t, e] -> [block, tile][h, w, g, t][step][e, c, i]
    shaped = codes.reshape(-1, 2, 4, 2, 8, tiles, 4, 2, 4, 2).transpose(0, 5, 1, 2, 4, 8, 6, 9, 7, 3)
    split = np.ascontiguousarray(shaped).reshape(-1, 8)
    words = np.zeros(len(split), np.uint32)
    for slot, places in enumerate(bits):
        placed = [sum((code >> bit & 1) << place for bit, place in enumerate(places)) for code in range(16)]
        words |= np.array(placed, np.uint32).take(split[:, slot])
    return words.view(np.uint8).reshape(-1, tiles, _CODE_BYTES)


def _unpack_codes(packed: Array, bits: tuple[tuple[int, ...], ...]) -> Array:
    """The inverse of `_pack_codes`."""
    blocks, tiles = packed.shape[:2]
    words = np.ascontiguousarray(packed).view(np.uint32).reshape(-1)
    split = np.zeros((len(words), 8), np.uint8)
    for slot, places in enumerate(bits):
        for bit, place in enumerate(places):
            split[:, slot] |= ((words >> np.uint32(place) & 1) << bit).astype(np.uint8)
    shaped = split.reshape(blocks, tiles, 2, 4, 8, 4, 4, 2, 2, 2).transpose(0, 2, 3, 9, 4, 1, 6, 8, 5, 7)
    return np.ascontiguousarray(shaped).reshape(blocks * ROWS, tiles * COLUMNS)


def _turned(words: Array, bits: int) -> Array:
    """Words of the bytes of groups 0, 3, 1, 2 in place of 0, 1, 2, 3, turned to the left by 4 bits; by 28, back.

    So the numbers of groups 0 and 1 stand in bits 4 .. 11 of both halves, and those of 2 and 3 do once the word is
    turned by 8 more.
    """
    quads = words.reshape(*words.shape[:-1], -1, 4)
    order = [0, 3, 1, 2] if bits == 4 else [0, 1, 2, 3]
    word = np.ascontiguousarray(quads[..., order]).view("<u4")
    word = word << np.uint32(bits) | word >> np.uint32(32 - bits)
    order = [0, 1, 2, 3] if bits == 4 else [0, 2, 3, 1]
    return np.ascontiguousarray(word.view(np.uint8)[..., order]).reshape(words.shape)


def _pack_groups(values: Array, tiles: int) -> Array:
    """[rows, groups] -> uint8 [blocks, tiles, bytes]."""
    per_tile = values.shape[1] // tiles
    shaped = values.reshape(-1, 2, 4, 2, 8, tiles, per_tile).transpose(0, 5, 1, 2, 4, 3, 6)
    return np.ascontiguousarray(shaped).view(np.uint8).reshape(-1, tiles, ROWS * per_tile * values.itemsize)


def _unpack_groups(packed: Array, per_tile: int) -> Array:
    """The inverse of `_pack_groups`, of elements [blocks, tiles, 128 * per_tile]."""
    blocks, tiles = packed.shape[:2]
    shaped = packed.reshape(blocks, tiles, 2, 4, 8, 2, per_tile).transpose(0, 2, 3, 5, 4, 1, 6)
    return np.ascontiguousarray(shaped).reshape(blocks * ROWS, tiles * per_tile)
