"""Integer quantisers against a slow definition, the gguf package's blocks, and every edge a real tensor may have."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from atlas.errors import BuildError, CheckpointError
from atlas.targets.formats import FORMATS
from atlas.weights.quantized import BlockArray, QuantizedArray, to_rows
from atlas.weights.quantizers import quantize_int4, quantize_int8, quantize_rows

SCHEMES = ("symmetric", "zero", "minimum")
Array = np.ndarray[Any, Any]

MADE_AT_LOAD = ("i8g32", "i4g32", "i4g32b", "i4g32m", "f8", "f8g128", "nvfp4")


def matrix(n: int, k: int) -> Array:
    """Rows of different sizes, some heavy-tailed, some one-sided."""
    rng = np.random.default_rng()
    values = rng.standard_t(4, (n, k)) * 10.0 ** rng.uniform(-3, 2, (n, 1))
    values[::3] = np.abs(values[::3])
    values[1::3, : k // 2] *= -1
    return values.astype(np.float32)


def squared_error(array: QuantizedArray, values: Array) -> Array:
    """Per row, in float64."""
    return ((array.dequantize().astype(np.float64) - values) ** 2).sum(axis=1)


def levels(array: QuantizedArray, row: int, column: int) -> Array:
    """Every value that the element's group can take."""
    group = column // array.group[1]
    codes = np.arange(-127, 128) if array.code == "i8" else np.arange(16)
    zero = 0 if array.zeros is None else array.zeros[row, group]
    minimum = 0 if array.minimums is None else array.minimums[row, group]
    return (codes - np.float64(zero)) * np.float64(array.scales[row, group]) + np.float64(minimum)


@pytest.mark.parametrize("k, size", [(64, 32), (576, 64), (100, 32), (128, 128), (200, 128), (7, 32)])
@pytest.mark.parametrize("scheme", (*SCHEMES, "int8"))
def test_every_code_is_the_nearest_under_the_stored_scale(scheme: str, k: int, size: int) -> None:
    values = matrix(6, k)
    array = quantize_int8(values, size) if scheme == "int8" else quantize_int4(values, size, scheme)
    assert array.shape == values.shape
    assert array.scales.shape == (6, -(-k // size))
    back = array.dequantize()
    for row in range(6):
        for column in range(k):
            grid, value = levels(array, row, column), np.float64(values[row, column])
            nearest = grid[np.abs(grid - value).argmin()]
            # float32 arithmetic may see a tie where there is nearly one.
            assert abs(back[row, column] - value) <= abs(nearest - value) * (1 + 1e-5) + 1e-6 * np.abs(grid).max()


def slow_search(x: Array, scheme: str) -> float:
    """The smallest squared error over ranges, each with its least-squares scale: one group, float64, by definition."""
    x = x.astype(np.float64)
    best = np.inf
    for fraction in (1.05, 1.0, 0.93, 0.86, 0.79, 0.72):
        if scheme == "symmetric":
            end = x[np.abs(x).argmax()]
            q = np.clip(np.rint(x / (end * fraction / -8)), -8, 7)
        elif scheme == "zero":
            low, high = min(x.min(), 0), max(x.max(), 0)
            step = (high - low) * fraction / 15
            zero = np.clip(np.rint(-low * fraction / step), 1, 15)
            q = np.clip(np.rint(x / step + zero), 0, 15) - zero
        else:
            step = (x.max() - x.min()) * fraction / 15
            q = np.clip(np.rint((x - (x.max() + x.min()) / 2) / step + 7.5), 0, 15)
        terms = [q, np.ones_like(q)] if scheme == "minimum" else [q]
        _, residual, rank, _ = np.linalg.lstsq(np.stack(terms, 1), x, rcond=None)
        assert rank == len(terms)
        best = min(best, float(residual[0]))
    return best


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_search_finds_what_the_slow_definition_finds(scheme: str) -> None:
    values = matrix(40, 32)
    errors = squared_error(quantize_int4(values, 32, scheme, "f32"), values)
    for row, error in zip(values, errors, strict=True):
        # Nearest codes under the fitted scale can only lower what the search saw.
        assert error <= slow_search(row, scheme) * 1.002


@pytest.mark.parametrize("scheme, kind", [("symmetric", "Q4_0"), ("minimum", "Q4_1")])
def test_better_than_ggufs_rounding(scheme: str, kind: str) -> None:
    values = np.random.default_rng().standard_normal((64, 576)).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    theirs = ((gguf.dequantize(gguf.quantize(values, type_), type_) - values) ** 2).sum()
    assert squared_error(quantize_int4(values, 32, scheme), values).sum() < 0.93 * theirs


def test_int8_groups_are_gguf_q8_0() -> None:
    values = np.random.default_rng().standard_normal((50, 96)).astype(np.float32)
    array = quantize_rows(values, "i8g32")
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0).reshape(50, 3, 34)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    np.testing.assert_array_equal(array.scales, scales.astype(np.float32))
    codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(50, 96)
    # gguf rounds with the scale before it is stored in f16; here the stored one counts.
    assert np.abs(array.codes - codes.astype(np.int32)).max() <= 1
    theirs = gguf.dequantize(blocks.reshape(50, -1), gguf.GGMLQuantizationType.Q8_0)
    assert squared_error(array, values).sum() <= ((theirs - values.astype(np.float64)) ** 2).sum()


@pytest.mark.parametrize("format", MADE_AT_LOAD)
@pytest.mark.parametrize("k", [32, 96, 100, 576])
def test_block_formats_hold_what_is_made_for_them(format: str, k: int) -> None:
    values = matrix(5, k)
    array = quantize_rows(values, format)
    stored = BlockArray(to_rows(array, format), FORMATS[format], k)
    np.testing.assert_array_equal(stored.astype(np.float32), array.dequantize())


@pytest.mark.parametrize("format", MADE_AT_LOAD)
def test_a_row_depends_on_no_other_row(format: str) -> None:
    values = matrix(300, 320)
    whole = quantize_rows(values, format)
    for begin, end in ((0, 1), (7, 260), (299, 300)):
        part = quantize_rows(values[begin:end], format)
        np.testing.assert_array_equal(part.codes, whole.codes[begin:end])
        np.testing.assert_array_equal(part.scales, whole.scales[begin:end])
        np.testing.assert_array_equal(part.dequantize(), whole.dequantize()[begin:end])


@pytest.mark.parametrize("scheme", (*SCHEMES, "int8"))
def test_zero_and_constant_rows(scheme: str) -> None:
    values = np.zeros((6, 64), np.float32)
    values[1], values[2], values[3], values[4, 5] = 3.5, -0.25, 1e-6, 7.0
    array = quantize_int8(values, 32) if scheme == "int8" else quantize_int4(values, 32, scheme)
    back = array.dequantize()
    np.testing.assert_array_equal(back[[0, 5]], 0)
    np.testing.assert_array_equal(back[4, 32:], 0)
    np.testing.assert_allclose(back[1:3], values[1:3], rtol=1e-3)
    np.testing.assert_allclose(back[4], values[4], atol=4e-3)
    # What f16 cannot scale finely is still nearer to the value than to zero.
    assert (np.abs(back[3] - 1e-6) < 0.5e-6).all()


@pytest.mark.parametrize("scheme", (*SCHEMES, "int8"))
@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-30, 1e30, 1e38])
def test_subnormal_and_huge_values(scheme: str, size: float) -> None:
    values = np.random.default_rng().uniform(-1, 1, (4, 64)).astype(np.float32) * np.float32(size)
    array = quantize_int8(values, 32) if scheme == "int8" else quantize_int4(values, 32, scheme, "f32")
    with np.errstate(all="raise", under="ignore"):
        back = array.dequantize()
    assert np.isfinite(back).all()
    # What the narrowest range cuts off, or what float32 itself can resolve; and most of the values' power is there.
    assert (np.abs(back - values) <= np.abs(values).max() * 0.3 + 3e-45).all()
    if size > 1e-44:
        unit, error = np.float64(values) / size, (np.float64(back) - values) / size
        assert (error**2).sum() < 0.02 * (unit**2).sum()


@pytest.mark.parametrize("format", MADE_AT_LOAD)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(format: str, bad: float) -> None:
    values = matrix(300, 320)
    values[271, 319] = bad
    with pytest.raises(CheckpointError, match=r"layers\.3\.down_proj.*row 271, column 319"):
        quantize_rows(values, format, "layers.3.down_proj")


@pytest.mark.parametrize("format", ["i8g32", "i4g32", "i4g32m"])
def test_a_scale_beyond_f16_is_refused_by_name(format: str) -> None:
    values = matrix(3, 64)
    values[2, 40] = -3e7
    with pytest.raises(CheckpointError, match=r"tensor head: a scale of .*f16"):
        quantize_rows(values, format, "head")


def test_formats_that_nothing_quantises_to() -> None:
    with pytest.raises(BuildError, match="i4g32f"):
        quantize_rows(matrix(3, 64), "i4g32f")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_are_what_their_dtype_holds(scheme: str, dtype: str) -> None:
    import ml_dtypes

    stored = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}[dtype]
    array = quantize_int4(matrix(9, 96), 32, scheme, dtype)
    for values in (array.scales, array.minimums):
        if values is not None:
            np.testing.assert_array_equal(values.astype(stored).astype(np.float32), values)
    assert array.codes.max() <= 15
    assert scheme != "zero" or (array.zeros is not None and array.zeros.min() >= 1 and array.zeros.max() <= 15)
