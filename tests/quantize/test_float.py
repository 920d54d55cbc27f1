"""FP8 and NVFP4 quantisers against element-wise definitions over every code, and known figures of their error."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas.errors import CheckpointError
from atlas.weights.quantizers import e2m1_codes, quantize_fp8, quantize_nvfp4, quantize_rows

Array = np.ndarray[Any, Any]


def e4m3_value(code: int) -> float:
    """By the definition of E4M3 (OCP 8-bit floating point, v1.0): bias 7, no infinity, 0x7f is NaN."""
    sign, exponent, mantissa = (-1) ** (code >> 7), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3_value(code) for code in range(256)])
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest_e4m3(x: float) -> float:
    """The nearest finite E4M3 value; of two equally near, the one with the even mantissa."""
    codes = [c for c in range(256) if not math.isnan(E4M3[c])]
    return float(E4M3[min(codes, key=lambda c: (abs(E4M3[c] - x), c & 1))])


def test_e2m1_thresholds_exhaustively() -> None:
    """Every threshold, its neighbours in float32, every value and both signs."""
    thresholds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    points = [thresholds, np.array(E2M1, np.float32), np.array([6.1, 1e30, 3e38, 1e-40, 0], np.float32)]
    points += [np.nextafter(thresholds, np.float32(0)), np.nextafter(thresholds, np.float32(9))]
    points.append(np.random.default_rng().uniform(-7, 7, 10000).astype(np.float32))
    x = np.concatenate([*points, -np.concatenate(points)])
    expected = x.astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(e2m1_codes(x), expected.view(np.uint8))
    below = [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7]  # under and over each threshold
    around = np.stack([np.nextafter(thresholds, np.float32(0)), np.nextafter(thresholds, np.float32(9))], 1)
    np.testing.assert_array_equal(e2m1_codes(around).ravel(), below)
    np.testing.assert_array_equal(e2m1_codes(thresholds), [0, 2, 2, 4, 4, 6, 6])


@pytest.mark.parametrize("group", [(0, 0), (1, 0), (128, 128), (16, 32)])
@pytest.mark.parametrize("shape", [(200, 576), (128, 128), (5, 100), (1, 1)])
def test_fp8_is_the_nearest_code_under_each_groups_scale(group: tuple[int, int], shape: tuple[int, int]) -> None:
    rng = np.random.default_rng()
    values = (rng.standard_normal(shape) * 10 ** rng.uniform(-6, 3, (shape[0], 1))).astype(np.float32)
    array = quantize_fp8(values, group)
    rows, columns = group[0] or shape[0], group[1] or shape[1]
    assert array.group == (rows, columns)
    assert array.scales.shape == (-(-shape[0] // rows), -(-shape[1] // columns))
    back = array.dequantize()
    for r, c in zip(rng.integers(0, shape[0], 100), rng.integers(0, shape[1], 100), strict=True):
        block = values[r // rows * rows :, c // columns * columns :][:rows, :columns]
        scale = np.float32(np.abs(block).max()) / np.float32(448)
        assert array.scales[r // rows, c // columns] == scale
        expected = np.float32(nearest_e4m3(float(np.float32(values[r, c]) / scale))) * scale
        assert back[r, c] == expected


def test_fp8_shares_a_scale_that_it_is_given() -> None:
    values = np.array([[1.0, -3.0]], np.float32)
    array = quantize_fp8(values, (0, 0), absmax=896.0)
    assert array.scales.tolist() == [[2.0]]
    np.testing.assert_array_equal(array.dequantize(), [[1.0, -3.0]])


def slow_nvfp4(values: Array) -> Array:
    """The definition in atlas/weights/quantizers.py, element by element."""
    shared = np.float32(np.abs(values).max()) / np.float32(6 * 448)
    result = np.zeros_like(values)
    for r in range(values.shape[0]):
        for begin in range(0, values.shape[1], 16):
            group = values[r, begin : begin + 16]
            scale = np.float32(nearest_e4m3(float(np.abs(group).max() / (np.float32(6) * shared)))) * shared
            for i, x in enumerate(group):
                if scale:
                    ratio = abs(x / scale)
                    code = min(range(8), key=lambda c: (abs(E2M1[c] - ratio), c & 1))
                    result[r, begin + i] = math.copysign(E2M1[code], x) * scale
    return result


@pytest.mark.parametrize("k", [16, 64, 576, 40])
def test_nvfp4_is_its_definition(k: int) -> None:
    values = np.random.default_rng().standard_normal((6, k)).astype(np.float32)
    values[2] *= 1e-7  # groups whose scale E4M3 rounds to zero
    array = quantize_nvfp4(values)
    assert array.scales.shape == (6, -(-k // 16))
    np.testing.assert_array_equal(array.dequantize(), slow_nvfp4(values))


def test_nvfp4_error_on_gaussian_data() -> None:
    """Measured elsewhere: .00904 for N(0,1)."""
    values = np.random.default_rng().standard_normal((1024, 1024)).astype(np.float32)
    for reciprocal in (False, True):
        error = quantize_nvfp4(values, reciprocal=reciprocal).dequantize() - values
        assert float((error**2).mean()) == pytest.approx(0.00904, rel=0.01)


def test_nvfp4_made_at_load_has_a_scale_for_each_row() -> None:
    """As the definition has it for each row alone, also of zeros."""
    values = np.random.default_rng().standard_normal((5, 200)).astype(np.float32)
    values *= np.array([1, 1e-3, 0, 1e4, 1e-30], np.float32)[:, None]
    back = quantize_rows(values, "nvfp4").dequantize()
    for row in range(5):
        alone = quantize_nvfp4(values[row : row + 1]).dequantize()
        # The row is divided by its scale before it is quantised, which may tip a tie.
        assert np.isclose(back[row], alone[0], rtol=1e-6, atol=0).mean() > 0.98
        assert np.abs(back[row] - values[row]).max() <= np.abs(values[row]).max() / 6 * 1.07


@pytest.mark.parametrize("format, size", [("f8", 200), ("f8g128", 128)])
def test_fp8_rows_have_scales_of_their_own(format: str, size: int) -> None:
    """Of the largest value in each group; each code is within half a step of its value."""
    values = np.random.default_rng().standard_normal((40, 200)).astype(np.float32)
    values *= 10.0 ** np.random.default_rng().integers(-20, 20, (40, 1)).astype(np.float32)
    values[7] = 0
    array = quantize_rows(values, format)
    back = array.dequantize()
    for row in range(40):
        for group, column in enumerate(range(0, 200, size)):
            part = values[row, column : column + size]
            scale = np.abs(part).max() / np.float32(448)
            assert array.scales[row, group] == scale
            # Half a step of three bits of fraction, or of the smallest number.
            error = np.abs(back[row, column : column + size] - part)
            assert (error <= np.maximum(np.abs(part) * 2.0**-4 * 1.0001, scale * 2.0**-10 * 1.0001)).all()


@pytest.mark.parametrize("format", ["f8", "f8g128", "nvfp4", "i4g32b"])
def test_a_value_that_is_not_finite_is_named(format: str) -> None:
    values = np.random.default_rng().standard_normal((9, 96)).astype(np.float32)
    values[4, 70] = -np.inf
    with pytest.raises(CheckpointError, match=r"tensor q_proj: -inf at row 4, column 70; accepted: finite values"):
        quantize_rows(values, format, "q_proj")


def test_nvfp4_reciprocal_is_what_a_reader_divides_by() -> None:
    values = np.random.default_rng().standard_normal((4, 64)).astype(np.float32)
    array = quantize_nvfp4(values, reciprocal=True)
    stored = np.float32(2688) / np.abs(values).max()
    assert array.global_scale == 1 / float(stored)
    assert np.float32(1 / array.global_scale) == stored
    shared = quantize_nvfp4(values, absmax=8.0)
    assert np.float32(shared.global_scale) == np.float32(8) / np.float32(2688)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-36, 1e30, 3e38])
def test_zeros_subnormal_and_huge_values(size: float) -> None:
    values = np.random.default_rng().uniform(-1, 1, (40, 64)).astype(np.float32) * np.float32(size)
    values[3] = 0
    arrays = [quantize_fp8(values, group) for group in ((0, 0), (1, 0), (16, 16))]
    arrays += [quantize_nvfp4(values), quantize_nvfp4(values, reciprocal=True)]
    for array in arrays:
        back = array.dequantize()
        assert np.isfinite(back).all()
        assert (back[3] == 0).all()
        assert array.code != "e4m3" or (array.scales > 0).all()
        # What is too small for a scale of its own becomes zero; nothing grows.
        assert (np.abs(back - values) <= np.abs(values).max() * 1.01 / 6 + 1.2e-38 * 2688).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    values = np.zeros((300, 320), np.float32)
    values[271, 319] = bad
    for group in ((0, 0), (1, 0), (128, 128)):
        with pytest.raises(CheckpointError, match=r"q_proj.*row 271, column 319"):
            quantize_fp8(values, group, "q_proj")
    with pytest.raises(CheckpointError, match=r"q_proj.*row 271, column 319"):
        quantize_nvfp4(values, "q_proj")
