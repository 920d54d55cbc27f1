"""Quantised arrays: conversions between formats keep every value, and the stored form is what its definition says."""

from __future__ import annotations

import dataclasses
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from atlas.errors import BuildError
from atlas.targets.formats import EXACT_IN, FORMATS, common
from atlas.weights.quantized import BlockArray, QuantizedArray, to_rows


def random_array(name: str, n: int, k: int, group: int = 32) -> QuantizedArray:
    """What a checkpoint might hold that fits the format `name`, with groups of `group` columns."""
    rng = np.random.default_rng()
    format, groups = FORMATS[name], -(-k // group)
    if format.element == "e4m3":
        bits = rng.integers(0, 256, (n, k)).astype(np.uint8)
        bits[bits & 0x7F == 0x7F] = 0x80  # the two NaN codes
        scales = rng.uniform(1e-4, 1e-2, (n, groups)).astype(np.float32)
        return QuantizedArray("e4m3", bits.view(ml_dtypes.float8_e4m3fn), scales, (1, group))
    if format.element == "e2m1":
        scales = rng.uniform(0, 448, (n, groups)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
        scale = float(np.float32(rng.uniform(1e-5, 1e-3)))
        return QuantizedArray("e2m1", codes, scales, (1, group), global_scale=scale)
    dtypes: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
    scales = rng.uniform(1e-3, 1e-2, (n, groups)).astype(dtypes[format.scale])
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
@pytest.mark.parametrize("k, groups", [(32, 1), (576, 1), (576, 2), (512, 4), (72, 1), (100, 4)])
def test_every_exact_format_keeps_the_values(name: str, k: int, groups: int) -> None:
    """Groups of as many columns as the format's, or multiples: 576 is no multiple of 128."""
    array = random_array(name, 5, k, FORMATS[name].group * groups or k)
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
    for name in FORMATS.keys() - {"i4g32f"}:
        with pytest.raises(BuildError, match=name):
            to_rows(array, name)
    fine = dataclasses.replace(random_array("i8g32", 4, 64), scales=np.full((4, 2), 1e-9, np.float32))
    with pytest.raises(BuildError, match=r"i8g32: scales"):
        to_rows(fine, "i8g32")
    with pytest.raises(BuildError, match="group"):
        to_rows(dataclasses.replace(fine, group_index=np.zeros(64, np.int32)), "i8g32f")
    with pytest.raises(BuildError, match="groups of 64 columns; accepted: a multiple of 128"):
        to_rows(random_array("f8g128", 4, 256, 64), "f8g128")
    for scale in (0.3, np.nan):  # no E4M3 number
        fp4 = random_array("nvfp4", 4, 64, 16)
        fp4.scales[2, 1] = scale
        with pytest.raises(BuildError, match="nvfp4: scales"):
            to_rows(fp4, "nvfp4")


def bytes_of(row: np.ndarray[Any, Any], begin: int, dtype: Any, count: int) -> np.ndarray[Any, Any]:
    return row[begin : begin + count * np.dtype(dtype).itemsize].view(dtype).astype(np.float32)


@pytest.mark.parametrize("k", [16, 100, 576, 1024])
def test_stored_rows_of_f8_f8g128_and_nvfp4_are_what_the_formats_say(k: int) -> None:
    """Codes, scales and row scales read back from their bytes one group at a time."""
    for name, size in (("f8", k), ("f8g128", 128), ("nvfp4", 16)):
        array = random_array(name, 3, k, size)
        stored, expected = to_rows(array, name), array.dequantize()
        group = FORMATS[name].group or -(-k // 128) * 128
        groups = -(-k // group)
        for row, values in zip(stored, expected, strict=True):
            if name != "nvfp4":
                codes = bytes_of(row, 0, ml_dtypes.float8_e4m3fn, groups * group)
                scales = bytes_of(row, groups * group, np.float32, groups)
            else:
                table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
                packed = row[: groups * 8]
                codes = table[np.stack([packed & 15, packed >> 4], 1).reshape(-1)]
                scales = bytes_of(row, groups * 8, ml_dtypes.float8_e4m3fn, groups)
                scales = scales * bytes_of(row, groups * 9, np.float32, 1)
            np.testing.assert_array_equal((codes * np.repeat(scales, group))[:k], values)
            assert not codes[k:].any()


def test_signs_of_fp4_scales_move_into_the_codes() -> None:
    array = random_array("nvfp4", 6, 128, 16)
    array.scales[1], array.scales[2], array.scales[3] = -array.scales[1], 0, -0.0
    stored = array.to_format("nvfp4")
    assert not np.signbit(stored.scales).any()
    assert not stored.codes[2:4].any()
    np.testing.assert_array_equal(stored.dequantize(), array.dequantize())


def test_factors_are_bf16_numbers() -> None:
    """nvfp4's are exact; other formats' are their values rounded once."""
    for name in ("nvfp4", "i4g32", "i4g32b", "i4g32z", "i4g32m"):
        array = random_array(name, 7, 96, FORMATS[name].group)
        matrix, scales = BlockArray(to_rows(array, name), FORMATS[name], 96).factors()
        np.testing.assert_array_equal(matrix.astype(ml_dtypes.bfloat16).astype(np.float32), matrix)
        if name == "nvfp4":
            assert scales is not None
            assert (scales == np.float32(array.global_scale)).all()
            expected = dataclasses.replace(array, global_scale=1.0).dequantize()
        else:
            assert scales is None
            expected = array.dequantize().astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(matrix, expected)


@pytest.mark.parametrize("format", ["f8", "f8g128"])
@pytest.mark.parametrize("k", [128, 200, 576])
def test_rounded_rows(format: str, k: int) -> None:
    """What a buffer of E4M3 holds of rows, one group at a time in float64 beside a search over all codes."""
    rng = np.random.default_rng()
    x = (rng.standard_normal((9, k)) * 10.0 ** rng.integers(-6, 6, (9, 1))).astype(np.float32)
    x[3, :128] = 0
    x[4] = -0.0
    x[5] *= np.float32(1e-38)
    x[6, 7] = np.nan
    x[7, k - 1] = np.inf
    raw = np.full((12, FORMATS[format].row_bytes(k)), 0xFF, np.uint8)
    out = BlockArray(raw, FORMATS[format], k)
    out[:9] = x
    assert (raw[9:] == 0xFF).all()
    padded = -(-k // 128) * 128
    size = padded if format == "f8" else 128
    assert raw.shape[1] == padded + 4 * (padded // size)
    table = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # 0 .. 448
    for row in range(9):
        codes = raw[row, :padded].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scales = raw[row, padded:].view(np.float32)
        for g in range(padded // size):
            part = np.zeros(size, np.float32)
            part[: min(size, k - size * g)] = x[row, size * g : size * g + size]
            found = codes[size * g : size * g + size]
            largest = np.abs(part).max()
            if not np.isfinite(largest):
                assert np.isnan(scales[g]) and not found.any()
            elif largest < 2.0**-100:
                assert scales[g] == 0 and not found.any()
            else:
                assert scales[g] == np.float32(largest / np.float32(448))
                scaled = (part * np.float32(np.float32(448) / largest)).astype(np.float64)
                distance = np.abs(table[None] - np.abs(scaled)[:, None])
                nearest = distance.min(1)
                np.testing.assert_array_equal(np.abs(np.abs(found) - np.abs(scaled)), nearest)
                assert (np.sign(found) * np.sign(scaled) >= 0).all()
                tie = (distance == nearest[:, None]).sum(1) > 1
                assert (
                    np.abs(found[tie]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) % 2 == 0
                ).all()
    with pytest.raises(BuildError, match="nvfp4"):
        BlockArray(np.zeros((2, FORMATS["nvfp4"].row_bytes(k)), np.uint8), FORMATS["nvfp4"], k)[:1] = x[:1]


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
    assert common(["i4g32", "i4g32z"], ["i4g32", "bf16"]) is None
    assert common(["i4g32"], ["i4g32z", "i8g32"]) == "i4g32z"
    assert common(["f8", "f8"]) == "f8"
    assert common(["f8", "f8g128"]) == common(["f8g128"]) == common(["f8"], ["f8g128"]) == "f8g128"
    assert common(["f8g128", "nvfp4"]) is None
