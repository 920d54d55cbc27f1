"""Rows of activations rounded to `f8g128`: the arithmetic that every kernel which writes such rows must have."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from atlas.targets.formats import FORMATS

Array = np.ndarray[Any, Any]

FORMAT = FORMATS["f8g128"]
LARGEST = np.float32(448)
"""The largest finite E4M3 number."""
SMALLEST = np.float32(2.0**-100)
"""A group whose largest magnitude is below this counts as zeros: 448 / a would overflow not far beneath it."""


def quantize_activations(rows: Array, shared: int = 1) -> tuple[Array, Array]:
    """float32 [rows, k] -> E4M3 codes [rows, groups * 128] and float32 scales [rows, groups].

    Of each group of 128 columns (columns past k count as zeros), in fp32: a = max |x|, code = E4M3(x * (448 / a)),
    nearest, ties to even, saturating; scale = a / 448. Both quotients are rounded to nearest. A group with `a` below
    2^-100 is zeros with scale 0; one with a NaN or an infinity has scale NaN and codes 0, so that whatever is
    multiplied with the row becomes NaN. shared: rows, counted from the first, whose groups are one (of weights).
    """
    n, k = rows.shape
    groups = FORMAT.groups(k)
    x = np.zeros((n, groups * FORMAT.group), np.float32)
    x[:, :k] = rows
    x = x.reshape(n, groups, FORMAT.group)
    largest = np.abs(x).max(-1, initial=0.0)  # NaN wins
    if shared > 1 and n:
        largest = np.repeat(np.maximum.reduceat(largest, np.arange(0, n, shared)), shared, axis=0)[:n]
    finite = np.isfinite(largest)
    used = finite & (largest >= SMALLEST)
    factor = LARGEST / np.where(used, largest, np.float32(1))
    scaled = np.where(used[:, :, None], x, np.float32(0)) * factor[:, :, None]
    # The product may round to just above 448, which saturates.
    codes = np.clip(scaled, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).reshape(n, -1)
    scales = np.where(used, largest / LARGEST, np.where(finite, np.float32(0), np.float32(np.nan)))
    return codes, scales
