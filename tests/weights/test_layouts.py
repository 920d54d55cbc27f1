"""Layouts: every element at the place the layout's definition gives, zeros elsewhere, and back again."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas.errors import BuildError
from atlas.targets.formats import FORMATS, INTEGER_FORMATS
from atlas.weights.layouts import LAYOUTS
from tests.weights.test_quantized import random_array

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
    per_lane = 4 // dtype.itemsize
    lanes = -(-k // per_lane)
    panels = packed.reshape(-1, lanes, 16, per_lane).astype(np.float32)
    for row in range(len(panels) * 16):
        expected = np.zeros(lanes * per_lane, np.float32)
        if row < n:
            expected[:k] = array[row]
        np.testing.assert_array_equal(panels[row // 16, :, row % 16].reshape(-1), expected)
    np.testing.assert_array_equal(layout.unpack(packed, (n, k), name), array)
    np.testing.assert_array_equal(layout.unpack(packed.reshape(-1), (n, k), name), array)


@pytest.mark.parametrize("name", INTEGER_FORMATS)
@pytest.mark.parametrize("n, k", [(1, 1), (16, 32), (17, 576), (35, 72)])
def test_panel16_of_block_formats(n: int, k: int, name: str) -> None:
    """Each code, scale and offset at the byte that the layout names, counted out here one by one."""
    array, layout, format = random_array(name, n, k), LAYOUTS["panel16"], FORMATS[name]
    packed = layout.pack(array, name)
    groups = -(-k // 32)
    assert packed.nbytes == layout.nbytes((n, k), name)
    panels = packed.reshape(-(-n // 16), groups, -1)
    code_bytes = 64 * format.bits
    size = {"f16": 2, "f32": 4}
    kind = {"f16": np.float16, "f32": np.float32}
    for row in range(n):
        for g in range(groups):
            block, lane = panels[row // 16, g], row % 16
            for column in range(g * 32, min(k, g * 32 + 32)):
                step, i = divmod(column % 32, 4)
                if format.bits == 8:
                    code = int(block[step * 64 + lane * 4 + i]) - 128
                else:
                    code = int(block[step % 4 * 64 + lane * 4 + i]) >> (4 if step >= 4 else 0) & 15
                assert code == array.codes[row, column]
            scales = block[code_bytes : code_bytes + 16 * size[format.scale]].view(kind[format.scale])
            assert scales[lane] == array.scales[row, g]
            offsets = block[code_bytes + 16 * size[format.scale] :]
            if format.zero:
                assert array.zeros is not None
                assert offsets[lane] == array.zeros[row, g]
            elif format.minimum:
                assert array.minimums is not None
                assert offsets.view(kind[format.minimum])[lane] == array.minimums[row, g]
            else:
                assert not len(offsets)
    back = layout.unpack(packed, (n, k), name).astype(np.float32)
    np.testing.assert_array_equal(back, array.dequantize())
    part = layout.pack(array.rows(0, min(n, 16)), name).reshape(-1)
    np.testing.assert_array_equal(part, packed.reshape(-1)[: len(part)])  # panels can be packed by themselves


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
