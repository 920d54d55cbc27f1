"""Storage layouts of weights on a device: how a kernel wants a logical array to lie in memory.

A kernel file names the layout of an operand in its declaration (`[layouts]`); the loader packs, and
whoever reads a buffer back unpacks. `pack` and `unpack` only move elements: any element type or block
format (atlas/targets/formats.py), no arithmetic.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from atlas.errors import BuildError
from atlas.runtime.dtypes import NUMPY
from atlas.targets import formats
from atlas.targets.formats import FORMATS
from atlas.weights.quantized import BlockArray, QuantizedArray, to_rows

Array = np.ndarray[Any, Any]

PANEL_COLUMNS = 16


class Layout(abc.ABC):
    """How an array of a given shape is stored.

    row_granule: rows that are packed together: a run of whole granules can be packed by itself, and its bytes
        stand where they would in the packed whole, so that a large matrix need never be in memory at once.
    """

    row_granule: int = 1

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
    """A matrix [n, k] in panels of 16 of its rows, each stored k-major: [ceil(n / 16)][k][16].

    One k of a panel is one vector of 16 output columns of a linear. Rows past n are zero.
    """

    row_granule = PANEL_COLUMNS

    def nbytes(self, shape: tuple[int, ...], dtype: str) -> int:
        n, k = self._matrix(shape)
        return NUMPY[dtype].itemsize * -(-n // PANEL_COLUMNS) * PANEL_COLUMNS * k

    def pack(self, array: Array | QuantizedArray, dtype: str = "") -> Array:
        if isinstance(array, QuantizedArray):
            raise BuildError("layout panel16", f"a matrix in format {dtype}", "an element type")
        n, k = self._matrix(array.shape)
        source = _raw(np.ascontiguousarray(array))
        packed = np.empty((-(-n // PANEL_COLUMNS), k, PANEL_COLUMNS), source.dtype)
        packed[-1:] = 0
        for i, panel in enumerate(packed):  # panels fit the cache: 3 times faster than one big transpose
            rows = source[i * PANEL_COLUMNS : (i + 1) * PANEL_COLUMNS]
            panel[:, : len(rows)] = rows.T
        return packed.view(array.dtype)

    def unpack(self, array: Array, shape: tuple[int, ...], dtype: str) -> Array | BlockArray:
        n, k = self._matrix(shape)
        array = array.view(NUMPY[dtype])
        result = np.empty((n, k), _raw(array).dtype)
        for i, panel in enumerate(_raw(array).reshape(-1, k, PANEL_COLUMNS)):
            rows = result[i * PANEL_COLUMNS : (i + 1) * PANEL_COLUMNS]
            rows[:] = panel.T[: len(rows)]
        return result.view(array.dtype)

    @staticmethod
    def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
        if len(shape) != 2:
            raise BuildError("layout panel16", f"an array of shape {list(shape)}", "a matrix")
        return shape[0], shape[1]


def _raw(array: Array) -> Array:
    """The same bytes as unsigned integers, which NumPy moves faster than bf16."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


LAYOUTS: dict[str, Layout] = {"row_major": RowMajor(), "panel16": Panel16()}
"""By the name that kernel files use."""
