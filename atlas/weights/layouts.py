"""Storage layouts of buffers on a device: how a kernel wants a logical array to lie in memory.

A kernel file names the layout of an operand in its declaration (`[layouts]`), of weights, state and workspace alike;
the loader packs weights, kernels write the rest, and whoever reads a buffer back unpacks. `pack` and `unpack` only
move elements: any element type or block format (atlas/targets/formats.py), no arithmetic.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np

from atlas.errors import BuildError
from atlas.runtime.dtypes import NUMPY
from atlas.targets import formats
from atlas.targets.formats import FORMATS
from atlas.weights import block_panels, fragments, tiles
from atlas.weights.quantized import BlockArray, QuantizedArray, to_rows

Array = np.ndarray[Any, Any]

PANEL_COLUMNS = 16
_LANE = 4


class Layout(abc.ABC):
    """How an array of a given shape is stored.

    row_granule: rows that are packed together: a run of whole granules can be packed by itself, and its bytes
        stand where they would in the packed whole, so that a large matrix need never be in memory at once.
    paired: the rows are two halves, and row i of one is stored beside row i of the other: a run is taken from both,
        half a granule or a multiple of it each, and packed as a matrix of its own.
    """

    row_granule: int = 1
    paired: bool = False

    @abc.abstractmethod
    def nbytes(self, shape: tuple[int, ...], dtype: str) -> int:
        """Bytes that an array of an element type or block format takes, padding included."""

    @abc.abstractmethod
    def pack(self, array: Array | QuantizedArray, dtype: str = "") -> Array:
        """The stored form of a logical array: contiguous, `nbytes` long.

        array: plain elements of any type, or a QuantizedArray that `to_format(dtype)` brings to the block format.
        """

    @abc.abstractmethod
    def unpack(self, array: Array, shape: tuple[int, ...], dtype: str) -> Array | BlockArray:
        """The logical array of `shape` from its stored form, whatever shape that comes in."""


class RowMajor(Layout):
    """As the contract has it: C order, no padding."""

    def nbytes(self, shape: tuple[int, ...], dtype: str) -> int:
        return formats.nbytes(dtype, shape)

    def pack(self, array: Array | QuantizedArray, dtype: str = "") -> Array:
        if isinstance(array, QuantizedArray):
            return to_rows(array, dtype)
        return np.ascontiguousarray(array)

    def unpack(self, array: Array, shape: tuple[int, ...], dtype: str) -> Array | BlockArray:
        if dtype in FORMATS:
            return BlockArray(array, FORMATS[dtype], shape[-1])
        return array.view(NUMPY[dtype]).reshape(shape)


class Panel16(Layout):
    """A matrix [n, k] in panels of 16 of its rows, each stored along k: one vector of a panel is 16 lanes of 4
    bytes, a lane the next columns of one row. So one vector holds what 16 output columns of a linear need.

    f32: [ceil(n / 16)][k][16]; bf16, two columns a lane: [ceil(n / 16)][ceil(k / 2)][16][2]; block formats:
    [ceil(n / 16)][ceil(k / 32)] blocks (atlas/weights/block_panels.py). Rows past n and columns past k are zero.
    """

    row_granule = PANEL_COLUMNS

    def nbytes(self, shape: tuple[int, ...], dtype: str) -> int:
        n, k = _matrix("panel16", shape)
        rows = -(-n // PANEL_COLUMNS) * PANEL_COLUMNS
        return rows * (FORMATS[dtype].row_bytes(k) if dtype in FORMATS else self._lanes(k, NUMPY[dtype]) * _LANE)

    def pack(self, array: Array | QuantizedArray, dtype: str = "") -> Array:
        if isinstance(array, QuantizedArray):
            return block_panels.pack(array, FORMATS[dtype])
        n, k = _matrix("panel16", array.shape)
        lanes = self._lanes(k, array.dtype)
        source = np.ascontiguousarray(array)
        if source.nbytes < n * lanes * _LANE:
            source = np.pad(_raw(source), ((0, 0), (0, 1)))
        words = source.view(np.uint32)
        packed = np.empty((-(-n // PANEL_COLUMNS), lanes, PANEL_COLUMNS), np.uint32)
        packed[-1:] = 0
        for i, panel in enumerate(packed):  # panels fit the cache: 3 times faster than one big transpose
            rows = words[i * PANEL_COLUMNS : (i + 1) * PANEL_COLUMNS]
            panel[:, : len(rows)] = rows.T
        return packed.view(array.dtype)

    def unpack(self, array: Array, shape: tuple[int, ...], dtype: str) -> Array | BlockArray:
        n, k = _matrix("panel16", shape)
        if dtype in FORMATS:
            return block_panels.unpack(array, n, k, FORMATS[dtype])
        lanes = self._lanes(k, NUMPY[dtype])
        result = np.empty((n, lanes), np.uint32)
        for i, panel in enumerate(array.reshape(-1).view(np.uint32).reshape(-1, lanes, PANEL_COLUMNS)):
            rows = result[i * PANEL_COLUMNS : (i + 1) * PANEL_COLUMNS]
            rows[:] = panel.T[: len(rows)]
        return result.view(NUMPY[dtype])[:, :k]

    @staticmethod
    def _lanes(k: int, dtype: np.dtype[Any]) -> int:
        """Lanes that a row takes: one for 4 bytes of its elements."""
        return -(-k * dtype.itemsize // _LANE)


class Tiles(Layout):
    """A matrix in tiles of 128 rows by 128 bytes (atlas/weights/tiles.py)."""

    row_granule = tiles.ROWS

    def nbytes(self, shape: tuple[int, ...], dtype: str) -> int:
        return tiles.nbytes(*_matrix("tiles", shape), dtype)

    def pack(self, array: Array | QuantizedArray, dtype: str = "") -> Array:
        return tiles.pack(array, dtype)

    def unpack(self, array: Array, shape: tuple[int, ...], dtype: str) -> Array | BlockArray:
        return tiles.unpack(array, *_matrix("tiles", shape), dtype)


class TilesPaired(Layout):
    """`tiles` of a matrix [gate; up], eight rows of each by turns (atlas/weights/tiles.py)."""

    row_granule = tiles.ROWS
    paired = True

    def nbytes(self, shape: tuple[int, ...], dtype: str) -> int:
        return tiles.nbytes(*_halves("tiles_paired", shape), dtype)

    def pack(self, array: Array | QuantizedArray, dtype: str = "") -> Array:
        n, _ = _halves("tiles_paired", array.shape)
        order = fragments.paired_rows(n)
        if isinstance(array, QuantizedArray):
            blocks = array.to_format(dtype)
            codes, scales = _ordered(blocks.codes, order), _ordered(blocks.scales, order)
            return tiles.pack(dataclasses.replace(blocks, codes=codes, scales=scales), dtype)
        return tiles.pack(_ordered(array, order), dtype)

    def unpack(self, array: Array, shape: tuple[int, ...], dtype: str) -> Array | BlockArray:
        n, k = _halves("tiles_paired", shape)
        order = fragments.paired_rows(n)
        place = np.empty(n, np.int64)
        place[order[order >= 0]] = np.flatnonzero(order >= 0)
        return tiles.unpack(array, len(order), k, dtype)[place]


class KvTiles(Layout):
    """A KV cache in pages of 16 tokens (atlas/weights/tiles.py)."""

    def nbytes(self, shape: tuple[int, ...], dtype: str) -> int:
        return tiles.pages_nbytes(shape, dtype)

    def pack(self, array: Array | QuantizedArray, dtype: str = "") -> Array:
        if isinstance(array, QuantizedArray):
            raise BuildError("layout kv_tiles", f"format {dtype}", "plain elements")
        return tiles.pages(array)

    def unpack(self, array: Array, shape: tuple[int, ...], dtype: str) -> Array | BlockArray:
        return tiles.cache_of(array, shape, dtype)


def _matrix(layout: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise BuildError(f"layout {layout}", f"an array of shape {list(shape)}", "a matrix")
    return shape[0], shape[1]


def _halves(layout: str, shape: tuple[int, ...]) -> tuple[int, int]:
    n, k = _matrix(layout, shape)
    if n % 2:
        raise BuildError(f"layout {layout}", f"{n} rows", "an even number: gate, then up")
    return n, k


def _ordered(rows: Array, order: Array) -> Array:
    """Rows in another order, zeros where it says -1."""
    result = np.zeros((len(order), *rows.shape[1:]), rows.dtype)
    used = order >= 0
    result[used] = rows[order[used]]
    return result


class Fragments(Layout):
    """A matrix in a format of 4 bits as the threads of wgmma hold it (atlas/weights/fragments.py)."""

    row_granule = fragments.ROWS

    def __init__(self, paired: bool = False) -> None:
        self.paired = paired

    def nbytes(self, shape: tuple[int, ...], dtype: str) -> int:
        blocks = -(-(shape[0] // 2) // (fragments.ROWS // 2)) if self.paired else -(-shape[0] // fragments.ROWS)
        return blocks * fragments.block_bytes(fragments.accepted(dtype), shape[1])

    def pack(self, array: Array | QuantizedArray, dtype: str = "") -> Array:
        if not isinstance(array, QuantizedArray):
            raise BuildError("layout frag4", f"plain elements of {array.dtype}", "a quantised matrix")
        return fragments.pack(array, fragments.accepted(dtype), self._order(array.shape[0]))

    def unpack(self, array: Array, shape: tuple[int, ...], dtype: str) -> BlockArray:
        return fragments.unpack(array, shape[0], shape[1], fragments.accepted(dtype), self._order(shape[0]))

    def _order(self, rows: int) -> Array | None:
        return fragments.paired_rows(rows) if self.paired else None


def _raw(array: Array) -> Array:
    """The same bytes as unsigned integers, which NumPy moves faster than bf16."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


LAYOUTS: dict[str, Layout] = {
    "row_major": RowMajor(),
    "panel16": Panel16(),
    "frag4": Fragments(),
    "frag4_paired": Fragments(paired=True),
    "tiles": Tiles(),
    "tiles_paired": TilesPaired(),
    "kv_tiles": KvTiles(),
}
"""By the name that kernel files use."""
