"""Layouts: every element at the place the layout's definition gives, zeros elsewhere, and back again."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas.errors import BuildError
from atlas.weights.layouts import LAYOUTS

DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


def matrix(n: int, k: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n * 1000 + k).standard_normal((n, k)).astype(dtype)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("n, k", [(1, 1), (15, 3), (16, 5), (17, 576), (64, 7), (100, 33)])
def test_panel16(n: int, k: int, name: str) -> None:
    dtype = DTYPES[name]
    array, layout = matrix(n, k, dtype), LAYOUTS["panel16"]
    packed = layout.pack(array)
    assert packed.dtype == dtype
    assert packed.nbytes == layout.nbytes(array.shape, name)
    panels = packed.reshape(-1, k, 16).astype(np.float32)
    for row in range(len(panels) * 16):
        expected = array[row].astype(np.float32) if row < n else np.zeros(k, np.float32)
        np.testing.assert_array_equal(panels[row // 16, :, row % 16], expected)
    np.testing.assert_array_equal(layout.unpack(packed, (n, k), name), array)
    np.testing.assert_array_equal(layout.unpack(packed.reshape(-1), (n, k), name), array)


def test_panel16_keeps_bits_and_takes_views() -> None:
    """NaN payloads survive, and the input may be a strided view."""
    bits = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8) + 0x7FC0
    array = bits.view(ml_dtypes.bfloat16)[::2]
    layout = LAYOUTS["panel16"]
    np.testing.assert_array_equal(
        np.asarray(layout.unpack(layout.pack(array), array.shape, "bf16")).view(np.uint16), bits[::2]
    )


def test_panel16_refuses_what_is_no_matrix() -> None:
    with pytest.raises(BuildError, match=r"panel16.*\[3\].*a matrix"):
        LAYOUTS["panel16"].pack(np.zeros(3, np.float32))


@pytest.mark.parametrize("name", DTYPES)
def test_row_major(name: str) -> None:
    dtype = DTYPES[name]
    array, layout = matrix(5, 3, dtype), LAYOUTS["row_major"]
    assert layout.pack(array.T).nbytes == layout.nbytes((3, 5), name) == 15 * dtype.itemsize
    np.testing.assert_array_equal(layout.unpack(layout.pack(array).reshape(-1), (5, 3), name), array)
