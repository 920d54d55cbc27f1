"""Slow readers of the layouts, written from their definitions and not from the writer: the oracle of what was written.

Each takes the tensors of one module and returns its float32 weight [n, k].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def f32(array: Array) -> Array:
    return np.asarray(array, np.float32)


def bits(words: Array, width: int, count: int) -> Array:
    """int32 words [rows, w] as `count` unsigned codes per row, the first in the lowest bits."""
    unsigned = words.view(np.uint32).astype(np.uint64)
    columns = [
        (unsigned[:, i * width // 32] >> np.uint64(i * width % 32)) & np.uint64((1 << width) - 1) for i in range(count)
    ]
    return np.stack(columns, axis=1).astype(np.int64)


def pack_quantized(t: Tensors, width: int = 4) -> Array:
    n, k = (int(extent) for extent in t["weight_shape"])
    half = 1 << (width - 1)
    codes, scales = bits(t["weight_packed"], width, k) - half, f32(t["weight_scale"])
    zeros = np.zeros(scales.shape)
    if "weight_zero_point" in t:
        zeros = bits(np.ascontiguousarray(t["weight_zero_point"].T), width, n).T - half
    size = k // scales.shape[1]
    return f32((codes - np.repeat(zeros, size, 1)) * np.repeat(scales, size, 1))


def pack_quantized8(t: Tensors) -> Array:
    return pack_quantized(t, 8)


def scaled(t: Tensors) -> Array:
    """int-quantized, and float-quantized per channel or per tensor."""
    return f32(t["weight"]) * f32(t["weight_scale"])


def blocks(t: Tensors) -> Array:
    """128 x 128, by either name of the scales."""
    scales = f32(t.get("weight_scale_inv", t.get("weight_scale")))
    n, k = t["weight"].shape
    return f32(t["weight"]) * np.repeat(np.repeat(scales, 128, 0)[:n], 128, 1)[:, :k]


def nvfp4(t: Tensors) -> Array:
    """compressed-tensors' (a global scale that divides) and modelopt's (one that multiplies)."""
    packed = t["weight_packed"] if "weight_packed" in t else t["weight"]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    values = np.array(E2M1 + [-value for value in E2M1], np.float32)[codes]
    assert t["weight_scale"].dtype == ml_dtypes.float8_e4m3fn
    scales = f32(t["weight_scale"])
    scales = scales * t["weight_scale_2"] if "weight_scale_2" in t else scales / t["weight_global_scale"]
    return values * np.repeat(scales, 16, 1)


def gptq(t: Tensors) -> Array:
    rows, n = t["qweight"].shape
    codes = bits(np.ascontiguousarray(t["qweight"].T), 4, rows * 8).T  # [k, n]
    zeros = (bits(t["qzeros"], 4, n) + 1)[t["g_idx"]]
    return f32(((codes - zeros) * f32(t["scales"])[t["g_idx"]]).T)


def awq(t: Tensors) -> Array:
    k = t["qweight"].shape[0]
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # where column i of an octet stands

    def unpack(words_: Array) -> Array:
        codes = bits(words_, 4, words_.shape[1] * 8)
        return codes.reshape(len(codes), -1, 8)[:, :, order].reshape(len(codes), -1)

    group = k // len(t["scales"])
    codes, zeros = unpack(t["qweight"]), np.repeat(unpack(t["qzeros"]), group, 0)
    return f32(((codes - zeros) * np.repeat(f32(t["scales"]), group, 0)).T)


Reader = Callable[[Tensors], Array]
