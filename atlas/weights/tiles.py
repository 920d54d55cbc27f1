"""Layouts `tiles`, `tiles_paired` and `kv_tiles`: rows of 128 bytes in the order that matrix instructions read.

`tiles` cuts a matrix into tiles of 128 rows by 128 bytes (64 bf16, 128 codes), in the order [row block][k tile]
[row][128 bytes]: one tile is one contiguous copy. The eight 16-byte chunks of a row are permuted, chunk c of row r
stands at c ^ (r % 8), which is the 128-byte swizzle of wgmma and lets ldmatrix read without bank conflicts
(PTX ISA, "Strides" and "Swizzling modes" of asynchronous warpgroup matrices). Behind the codes of a tile format f8g128
has the f32 scales of its 128 rows; format f8 has those of a row block behind its last tile. `tiles_paired` is `tiles`
of [gate; up] whose rows are rearranged as in `frag4_paired` (atlas/weights/fragments.py): block b has, for q = 0..7,
gate rows 64 b + 8 q .. + 7 and then the up rows of the same numbers, so that one thread of wgmma has both factors of
what it leaves. `kv_tiles` is the same for pages of a KV cache, 16 tokens high.

kernels/h200/include/atlas/tiles.cuh and kv_tiles.cuh are the other side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.errors import BuildError
from atlas.runtime.dtypes import NUMPY
from atlas.targets.formats import FORMATS
from atlas.targets.shape import KV_BLOCK_SIZE
from atlas.weights.quantized import BlockArray, QuantizedArray

Array = np.ndarray[Any, Any]

ROWS = ROW_BYTES = 128
_CHUNK = 16
_CHUNKS = ROW_BYTES // _CHUNK
_CODES, _SCALES = ROWS * ROW_BYTES, 4 * ROWS
_FORMATS = ("f8", "f8g128")
"""The block formats that can be stored so."""

_SWIZZLE = (np.arange(8)[:, None] * _CHUNKS + (np.arange(8)[:, None] ^ np.arange(_CHUNKS))).reshape(-1)
"""Of 8 rows of chunks, which stands at each place; it is its own inverse."""


def nbytes(n: int, k: int, dtype: str) -> int:
    """Bytes of a matrix in `tiles`."""
    return -(-n // ROWS) * _block_bytes(_tiles(k, dtype), dtype)


def pack(array: Array | QuantizedArray, dtype: str) -> Array:
    """A matrix in `tiles`, as bytes: rows past its end and columns past k are zeros."""
    if not isinstance(array, QuantizedArray):
        return swizzled(np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1), ROWS)
    blocks = array.to_format(_accepted(dtype))
    codes = swizzled(blocks.codes.view(np.uint8), ROWS)
    scales = np.zeros((len(codes) * ROWS, blocks.scales.shape[1]), np.float32)
    scales[: len(blocks.scales)] = blocks.scales
    by_tile = np.ascontiguousarray(scales.reshape(len(codes), ROWS, -1).transpose(0, 2, 1)).view(np.uint8)
    if dtype == "f8":
        codes, by_tile = codes.reshape(len(codes), -1), by_tile.reshape(len(codes), -1)
    return np.concatenate([codes, by_tile], axis=-1)


def unpack(raw: Array, n: int, k: int, dtype: str) -> Array | BlockArray:
    """The matrix [n, k] of `pack`'s bytes."""
    tiles = _tiles(k, dtype)
    blocks = raw.reshape(-1).view(np.uint8).reshape(-1, _block_bytes(tiles, dtype))
    if dtype == "f8":
        codes, scales = blocks[:, : tiles * _CODES].reshape(-1, tiles, _CODES), blocks[:, None, tiles * _CODES :]
    else:
        parts = blocks.reshape(len(blocks), tiles, -1)
        codes, scales = parts[:, :, :_CODES], parts[:, :, _CODES:]
    rows = straightened(codes, ROWS)
    if dtype not in FORMATS:
        return np.ascontiguousarray(rows[:n, : k * NUMPY[dtype].itemsize]).view(NUMPY[dtype])
    by_row = np.ascontiguousarray(scales).view(np.float32).transpose(0, 2, 1).reshape(len(rows), -1)
    stored = np.concatenate([rows[:n], np.ascontiguousarray(by_row[:n]).view(np.uint8)], axis=1)
    return BlockArray(stored, FORMATS[dtype], k)


def pages(cache: Array) -> Array:
    """A KV cache [blocks, heads, 16, d] as bytes: a page for each block and head."""
    blocks, heads, tokens, _ = _cache_shape(cache.shape)
    rows = np.ascontiguousarray(cache).view(np.uint8).reshape(blocks * heads * tokens, -1)
    return swizzled(rows, tokens)


def pages_nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of `pages`."""
    blocks, heads, tokens, d = _cache_shape(shape)
    return blocks * heads * _tiles(d, dtype) * tokens * ROW_BYTES


def cache_of(raw: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """The KV cache of `pages`' bytes."""
    blocks, heads, tokens, d = _cache_shape(shape)
    element = NUMPY[dtype]
    tiles = raw.reshape(-1).view(np.uint8).reshape(blocks * heads, _tiles(d, dtype), tokens * ROW_BYTES)
    rows = straightened(tiles, tokens)[:, : d * element.itemsize]
    return np.ascontiguousarray(rows).view(element).reshape(shape)


def swizzled(rows: Array, height: int) -> Array:
    """Rows of bytes in tiles of `height` rows: uint8 [row blocks, tiles, height * 128]. height: a multiple of 8."""
    n, width = rows.shape
    blocks, tiles = -(-n // height), -(-width // ROW_BYTES)
    packed = np.empty((blocks, tiles, height // 8, 8 * _CHUNKS), f"V{_CHUNK}")
    for index, block in enumerate(packed):  # a block's rows fit the cache: 3 times faster than all at once
        part = rows[index * height : (index + 1) * height]
        if part.shape != (height, tiles * ROW_BYTES):
            padded = np.zeros((height, tiles * ROW_BYTES), np.uint8)
            padded[: len(part), :width] = part
            part = padded
        chunks = np.ascontiguousarray(part).view(packed.dtype).reshape(height, tiles, _CHUNKS).transpose(1, 0, 2)
        np.take(np.ascontiguousarray(chunks).reshape(block.shape), _SWIZZLE, axis=2, out=block, mode="clip")
    return packed.reshape(-1).view(np.uint8).reshape(blocks, tiles, height * ROW_BYTES)


def straightened(tiles: Array, height: int) -> Array:
    """The inverse of `swizzled`, with the padding: uint8 [row blocks * height, tiles * 128]."""
    chunks = np.ascontiguousarray(tiles).reshape(-1).view(f"V{_CHUNK}").reshape(*tiles.shape[:2], -1, 8 * _CHUNKS)
    rows = chunks.take(_SWIZZLE, axis=3).reshape(*tiles.shape[:2], height, _CHUNKS).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(len(tiles) * height, -1)


def _tiles(k: int, dtype: str) -> int:
    """Tiles of 128 bytes that k columns take."""
    size = 1 if dtype in FORMATS and _accepted(dtype) else NUMPY[dtype].itemsize
    return -(-k * size // ROW_BYTES)


def _block_bytes(tiles: int, dtype: str) -> int:
    """Bytes of a row block of so many tiles."""
    scales = {"f8": 1, "f8g128": tiles}.get(dtype, 0)
    return tiles * _CODES + scales * _SCALES


def _accepted(format: str) -> str:
    """The block format, if there is a layout of it."""
    if format not in _FORMATS:
        raise BuildError("layout tiles", f"format {format}", f"{', '.join(_FORMATS)} or plain elements")
    return format


def _cache_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    if len(shape) != 4 or shape[2] != KV_BLOCK_SIZE:
        raise BuildError(
            "layout kv_tiles", f"an array of shape {list(shape)}", f"a cache [blocks, heads, {KV_BLOCK_SIZE}, d]"
        )
    blocks, heads, tokens, d = shape
    return blocks, heads, tokens, d
