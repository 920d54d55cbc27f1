"""Quantised arrays: conversions between formats keep every value, and the stored form is what its definition says."""

from __future__ import annotations

import dataclasses
from typing import Any

import gguf
import numpy as np
import pytest

from atlas.errors import BuildError
from atlas.targets.formats import EXACT_IN, FORMATS, common
from atlas.weights.quantized import BlockArray, QuantizedArray, to_rows


def random_array(name: str, n: int, k: int, group: int = 32) -> QuantizedArray:
    """What a checkpoint might hold that fits the format `name`, with groups of `group` columns."""
    rng = np.random.default_rng()
    format, groups = FORMATS[name], -(-k // group)
    scales = rng.uniform(1e-3, 1e-2, (n, groups)).astype(np.float16 if format.scale == "f16" else np.float32)
    codes = rng.integers(-128, 128, (n, k)) if format.signed else rng.integers(0, 16, (n, k))
    zeros = minimums = None
    if format.zero:
        zeros = rng.integers(0, 17, scales.shape).astype(np.int16)
    if format.bias:
        zeros = np.full(scales.shape, format.bias, np.int16)
    if format.minimum:
        minimums = -rng.uniform(0, 0.1, scales.shape).astype(np.float16 if format.minimum == "f16" else np.float32)
        minimums = minimums.astype(np.float32)
    code: Any = "i8" if format.signed else "u4"
    dtype = np.int8 if format.signed else np.uint8
    return QuantizedArray(code, codes.astype(dtype), scales.astype(np.float32), (1, group), zeros, minimums)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k, group", [(32, 32), (576, 32), (576, 64), (512, 128), (72, 32), (100, 128)])
def test_every_exact_format_keeps_the_values(name: str, k: int, group: int) -> None:
    array = random_array(name, 5, k, group)
    expected = array.dequantize()
    for target in EXACT_IN[name]:
        stored = to_rows(array, target)
        # Once in the format, always: the loader brings rows to it before they are packed.
        again = array.to_format(target)
        np.testing.assert_array_equal(to_rows(again, target), stored)
        np.testing.assert_array_equal(
            again.dequantize()[:, :k], BlockArray(stored, FORMATS[target], k).astype(np.float32)
        )
        assert stored.shape == (5, FORMATS[target].row_bytes(k))
        back = BlockArray(stored, FORMATS[target], k)
        # A zero point turned into a minimum is one rounding more.
        exact = not (FORMATS[target].minimum and not FORMATS[name].minimum)
        np.testing.assert_allclose(back.astype(np.float32), expected, rtol=0, atol=0 if exact else 2e-8)
        np.testing.assert_array_equal(back[[3, 1]].astype(np.float32), back.astype(np.float32)[[3, 1]])


@pytest.mark.parametrize("name, kind", [("i8g32", "Q8_0"), ("i4g32", "Q4_0"), ("i4g32m", "Q4_1")])
def test_formats_hold_gguf_blocks_exactly(name: str, kind: str) -> None:
    """The gguf package's own quantiser and dequantisation are the reference."""
    values = np.random.default_rng().standard_normal((7, 96)).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(values, type_)
    blocks = raw.reshape(7, 3, -1)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0].astype(np.float32)
    zeros = minimums = None
    if kind == "Q8_0":
        codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(7, 96)
    else:
        nibbles = blocks[:, :, -16:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).reshape(7, 96)
        zeros = np.full(scales.shape, 8, np.int16) if kind == "Q4_0" else None
    if kind == "Q4_1":
        minimums = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16)[:, :, 0].astype(np.float32)
    array = QuantizedArray("i8" if kind == "Q8_0" else "u4", codes, scales, (1, 32), zeros, minimums)
    expected = gguf.dequantize(raw, type_)
    np.testing.assert_array_equal(array.dequantize(), expected)
    np.testing.assert_array_equal(BlockArray(to_rows(array, name), FORMATS[name], 96).astype(np.float32), expected)


def test_what_a_format_cannot_hold_is_refused() -> None:
    array = random_array("i4g32f", 4, 64)
    for name in set(FORMATS) - {"i4g32f"}:
        with pytest.raises(BuildError, match=name):
            to_rows(array, name)
    fine = dataclasses.replace(random_array("i8g32", 4, 64), scales=np.full((4, 2), 1e-9, np.float32))
    with pytest.raises(BuildError, match=r"i8g32: scales"):
        to_rows(fine, "i8g32")
    with pytest.raises(BuildError, match="group"):
        to_rows(dataclasses.replace(fine, group_index=np.zeros(64, np.int32)), "i8g32f")


def test_blocks_per_tensor_and_shared_by_rows() -> None:
    """Rows of a 128 x 128-block scale: each row finds its own scale, also after slicing."""
    rng = np.random.default_rng()
    codes = rng.integers(-127, 128, (200, 300)).astype(np.int8)
    scales = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    array = QuantizedArray("i8", codes, scales, (128, 128))
    expected = codes * np.repeat(np.repeat(scales, 128, 0)[:200], 128, 1)[:, :300]
    np.testing.assert_array_equal(array.dequantize(), expected)
    np.testing.assert_array_equal(array.rows(100, 150).dequantize(), expected[100:150])
    np.testing.assert_array_equal(array.rows(100, 150).rows(40, 50).dequantize(), expected[140:150])


def test_common_format() -> None:
    assert common(["i4g32", "i4g32z"]) == "i4g32z"
    assert common(["i4g32", "i8g32"]) == "i8g32"
    assert common(["i4g32m", "i4g32"]) == "i4g32f"
    assert common(["i4g32m", "i8g32"]) is None
    assert common([]) is None
