"""Layouts tiles, tiles_paired and kv_tiles: every byte at the place the definition gives, counted out one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atlas.build.kernel_file import LAYOUT_NAMES
from atlas.errors import BuildError
from atlas.runtime.dtypes import NUMPY
from atlas.targets.formats import FORMATS
from atlas.weights.layouts import LAYOUTS
from atlas.weights.quantized import BlockArray, QuantizedArray, concatenate
from atlas.weights.quantizers import quantize_rows

Array = np.ndarray[Any, Any]


def random(shape: tuple[int, ...], dtype: str) -> Array:
    """Random bytes: a NaN must keep its payload."""
    element = NUMPY[dtype]
    return (
        np.random.default_rng()
        .integers(0, 256, int(np.prod(shape)) * element.itemsize, np.uint8)
        .view(element)
        .reshape(shape)
    )


def at(row: int, byte: int, tiles: int, stride: int = 16384) -> int:
    """Where byte `byte` of a row stands in a matrix with `tiles` tiles in a row block."""
    tile = row // 128 * tiles + byte // 128
    row, byte = row % 128, byte % 128
    return tile * stride + row * 128 + ((byte // 16) ^ (row % 8)) * 16 + byte % 16


def paired(row: int, half: int) -> int:
    """Where row `row` of the gate (half 0) or of the up matrix stands in tiles_paired: eight of each by turns."""
    return row // 64 * 128 + row % 64 // 8 * 16 + 8 * half + row % 8


def same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", ["bf16", "f32", "i64"])
@pytest.mark.parametrize("n, k", [(1, 1), (128, 64), (130, 65), (9, 200), (257, 32)])
def test_tiles(n: int, k: int, dtype: str) -> None:
    array, layout = random((n, k), dtype), LAYOUTS["tiles"]
    packed = layout.pack(array).reshape(-1).view(np.uint8)
    raw = array.view(np.uint8).reshape(n, -1)
    width = raw.shape[1]
    tiles, blocks = -(-width // 128), -(-n // 128)
    assert len(packed) == layout.nbytes((n, k), dtype) == blocks * tiles * 16384
    expected = np.zeros_like(packed)
    for row in range(n):
        for byte in range(width):
            expected[at(row, byte, tiles)] = raw[row, byte]
    assert (packed == expected).all()
    assert same(layout.unpack(packed, (n, k), dtype), array)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("inner, k", [(1, 3), (64, 64), (65, 130), (200, 40)])
def test_tiles_paired(inner: int, k: int, dtype: str) -> None:
    array, layout = random((2 * inner, k), dtype), LAYOUTS["tiles_paired"]
    packed = layout.pack(array).reshape(-1).view(np.uint8)
    raw = array.view(np.uint8).reshape(2 * inner, -1)
    tiles = -(-raw.shape[1] // 128)
    assert len(packed) == layout.nbytes((2 * inner, k), dtype) == -(-inner // 64) * tiles * 16384
    expected = np.zeros_like(packed)
    for row in range(inner):
        for half in range(2):
            for byte in range(raw.shape[1]):
                expected[at(paired(row, half), byte, tiles)] = raw[half * inner + row, byte]
    assert (packed == expected).all()
    assert same(layout.unpack(packed, (2 * inner, k), dtype), array)


def fp8(n: int, k: int, format: str) -> QuantizedArray:
    values = np.random.default_rng().standard_normal((n, k)).astype(np.float32)
    return quantize_rows(values, format).to_format(format)


@pytest.mark.parametrize("name", ["tiles", "tiles_paired"])
@pytest.mark.parametrize("format", ["f8", "f8g128"])
@pytest.mark.parametrize("n, k", [(2, 1), (130, 300), (256, 128), (70, 129)])
def test_tiles_of_e4m3(n: int, k: int, name: str, format: str) -> None:
    """The codes as plain bytes, and behind each tile's codes, or behind a row block's last tile, 128 rows' scales."""
    array, layout = fp8(n, k, format), LAYOUTS[name]
    packed = layout.pack(array, format).reshape(-1).view(np.uint8)
    tiles, inner = -(-k // 128), n // 2
    blocks = -(-inner // 64) if name == "tiles_paired" else -(-n // 128)
    stride, between, groups = (16384, 512, 1) if format == "f8" else (16896, 0, tiles)
    assert len(packed) == layout.nbytes((n, k), format) == blocks * (tiles * stride + between)
    expected = np.zeros_like(packed)
    codes = array.codes.view(np.uint8)
    for row in range(n):
        place = row
        if name == "tiles_paired":
            half, inside = divmod(row, inner)
            place = paired(inside, half)
        for byte in range(k):
            expected[at(place, byte, tiles, stride) + place // 128 * between] = codes[row, byte]
        for group in range(groups):
            last = group if groups > 1 else tiles - 1
            begin = (place // 128 * tiles + last) * stride + 16384 + place // 128 * between + place % 128 * 4
            expected[begin : begin + 4] = np.frombuffer(array.scales[row, group].tobytes(), np.uint8)
    assert (packed == expected).all()
    found = layout.unpack(packed, (n, k), format)
    assert isinstance(found, BlockArray) and found.shape == (n, k)
    assert same(found.quantized().codes.view(np.uint8), np.ascontiguousarray(codes[:, :k]))
    assert same(found.quantized().scales, array.scales)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("blocks, heads, d", [(3, 2, 64), (2, 1, 96), (1, 3, 128), (2, 2, 40)])
def test_kv_tiles(blocks: int, heads: int, d: int, dtype: str) -> None:
    shape = (blocks, heads, 16, d)
    array, layout = random(shape, dtype), LAYOUTS["kv_tiles"]
    packed = layout.pack(array).reshape(-1).view(np.uint8)
    raw = array.view(np.uint8).reshape(blocks, heads, 16, -1)
    halves = -(-raw.shape[3] // 128)
    assert len(packed) == layout.nbytes(shape, dtype) == blocks * heads * halves * 2048
    expected = np.zeros_like(packed)
    for block in range(blocks):
        for head in range(heads):
            for token in range(16):
                for byte in range(raw.shape[3]):
                    page = ((block * heads + head) * halves + byte // 128) * 2048
                    place = page + token * 128 + ((byte % 128 // 16) ^ (token % 8)) * 16 + byte % 16
                    expected[place] = raw[block, head, token, byte]
    assert (packed == expected).all()
    assert same(layout.unpack(packed, shape, dtype), array)


@pytest.mark.parametrize("name", ["tiles", "tiles_paired"])
@pytest.mark.parametrize("dtype", ["bf16", "f8", "f8g128"])
def test_a_run_of_granules_packs_as_it_stands_in_the_whole(name: str, dtype: str) -> None:
    """What streaming relies on: of a paired layout a run is half from the gate's rows, half from the up's."""
    n, k, layout = 600, 200, LAYOUTS[name]
    array: Array | QuantizedArray = random((n, k), dtype) if dtype == "bf16" else fp8(n, k, dtype)

    def rows(begin: int, end: int) -> Array | QuantizedArray:
        return array.rows(begin, end) if isinstance(array, QuantizedArray) else array[begin:end]

    whole = layout.pack(array, dtype).reshape(-1).view(np.uint8)
    halves = 2 if layout.paired else 1
    step, inner = layout.row_granule // halves, n // halves
    for begin in range(0, inner, step):
        end = min(begin + step, inner)
        parts = [rows(half * inner + begin, half * inner + end) for half in range(halves)]
        joined = concatenate(parts) if isinstance(array, QuantizedArray) else np.concatenate(parts)  # type: ignore[arg-type]
        packed = layout.pack(joined, dtype).reshape(-1).view(np.uint8)
        offset = layout.nbytes((halves * begin, k), dtype)
        assert (whole[offset : offset + len(packed)] == packed).all()
    assert offset + len(packed) == len(whole) == layout.nbytes((n, k), dtype)


def test_rows_beyond_a_run_time_count_do_not_move_the_others() -> None:
    """An activation buffer is planned for the most rows; where a row stands does not depend on how many there are."""
    layout, rows = LAYOUTS["tiles"], random((300, 100), "bf16")
    some, more = (layout.pack(rows[:count]).reshape(-1).view(np.uint8) for count in (130, 300))
    assert (layout.unpack(more[: len(some)], (130, 100), "bf16").view(np.uint16) == rows[:130].view(np.uint16)).all()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("tiles", (4,), "bf16", r"layout tiles: an array of shape \[4\]; accepted: a matrix"),
        ("tiles", (4, 64), "i4g32", "layout tiles: format i4g32; accepted: f8, f8g128 or plain elements"),
        ("tiles_paired", (3, 8), "bf16", "layout tiles_paired: 3 rows; accepted: an even number"),
        ("kv_tiles", (2, 8), "bf16", r"layout kv_tiles: an array of shape \[2, 8\]; accepted: a cache"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, shape: tuple[int, ...], dtype: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        LAYOUTS[name].nbytes(shape, dtype)


def test_every_layout_is_known_to_kernel_files() -> None:
    assert set(LAYOUTS) <= set(LAYOUT_NAMES) and FORMATS
