"""Storage layouts of weights on a device: how a kernel wants a logical array to lie in memory.

A kernel file names the layout of an operand in its declaration (`[layouts]`); the loader packs, and
whoever reads a buffer back unpacks. `pack` and `unpack` only move elements: any dtype, no arithmetic.
"""

from __future__ import annotations

import abc
import math
from typing import Any

import numpy as np

from atlas.errors import BuildError

Array = np.ndarray[Any, Any]

PANEL_COLUMNS = 16


class Layout(abc.ABC):
    """How an array of a given shape is stored."""

    @abc.abstractmethod
    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes that an array takes, padding included."""

    @abc.abstractmethod
    def pack(self, array: Array) -> Array:
        """The stored form of a logical array: contiguous, `nbytes` long."""

    @abc.abstractmethod
    def unpack(self, array: Array, shape: tuple[int, ...]) -> Array:
        """The logical array of `shape` from its stored form, whatever shape that comes in."""


class RowMajor(Layout):
    """As the contract has it: C order, no padding."""

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return itemsize * math.prod(shape)

    def pack(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def unpack(self, array: Array, shape: tuple[int, ...]) -> Array:
        return array.reshape(shape)


class Panel16(Layout):
    """A matrix [n, k] in panels of 16 of its rows, each stored k-major: [ceil(n / 16)][k][16].

    One k of a panel is one vector of 16 output columns of a linear. Rows past n are zero.
    """

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        n, k = self._matrix(shape)
        return itemsize * -(-n // PANEL_COLUMNS) * PANEL_COLUMNS * k

    def pack(self, array: Array) -> Array:
        n, k = self._matrix(array.shape)
        source = _raw(np.ascontiguousarray(array))
        packed = np.empty((-(-n // PANEL_COLUMNS), k, PANEL_COLUMNS), source.dtype)
        packed[-1:] = 0
        for i, panel in enumerate(packed):  # panels fit the cache: 3 times faster than one big transpose
            rows = source[i * PANEL_COLUMNS : (i + 1) * PANEL_COLUMNS]
            panel[:, : len(rows)] = rows.T
        return packed.view(array.dtype)

    def unpack(self, array: Array, shape: tuple[int, ...]) -> Array:
        n, k = self._matrix(shape)
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
