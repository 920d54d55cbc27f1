"""Layouts: every element at the place the layout's definition gives, zeros elsewhere, and back again."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas.errors import BuildError
from atlas.weights.layouts import LAYOUTS

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]


def matrix(n: int, k: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n * 1000 + k).standard_normal((n, k)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, k", [(1, 1), (15, 3), (16, 5), (17, 576), (64, 7), (100, 33)])
def test_panel16(n: int, k: int, dtype: np.dtype[Any]) -> None:
    array, layout = matrix(n, k, dtype), LAYOUTS["panel16"]
    packed = layout.pack(array)
    assert packed.dtype == dtype
    assert packed.nbytes == layout.nbytes(array.shape, dtype.itemsize)
    panels = packed.reshape(-1, k, 16).astype(np.float32)
    for row in range(len(panels) * 16):
        expected = array[row].astype(np.float32) if row < n else np.zeros(k, np.float32)
        np.testing.assert_array_equal(panels[row // 16, :, row % 16], expected)
    np.testing.assert_array_equal(layout.unpack(packed, (n, k)), array)
    np.testing.assert_array_equal(layout.unpack(packed.reshape(-1), (n, k)), array)


def test_panel16_keeps_bits_and_takes_views() -> None:
    """NaN payloads survive, and the input may be a strided view."""
    bits = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8) + 0x7FC0
    array = bits.view(ml_dtypes.bfloat16)[::2]
    layout = LAYOUTS["panel16"]
    np.testing.assert_array_equal(layout.unpack(layout.pack(array), array.shape).view(np.uint16), bits[::2])


def test_panel16_refuses_what_is_no_matrix() -> None:
    with pytest.raises(BuildError, match=r"panel16.*\[3\].*a matrix"):
        LAYOUTS["panel16"].pack(np.zeros(3, np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_major(dtype: np.dtype[Any]) -> None:
    array, layout = matrix(5, 3, dtype), LAYOUTS["row_major"]
    assert layout.pack(array.T).nbytes == layout.nbytes((3, 5), dtype.itemsize) == 15 * dtype.itemsize
    np.testing.assert_array_equal(layout.unpack(layout.pack(array).reshape(-1), (5, 3)), array)
