"""Rows of floats rounded to E4M3 (formats f8 and f8g128): the arithmetic of every kernel that writes such rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from atlas.targets.formats import Format

Array = np.ndarray[Any, Any]

LARGEST = np.float32(448)
"""The largest finite E4M3 number."""
SMALLEST = np.float32(2.0**-100)
"""A group whose largest magnitude is below this counts as zeros: 448 / a would overflow not far beneath it."""


def round_rows(rows: Array, format: Format) -> tuple[Array, Array]:
    """float32 [rows, k] -> E4M3 codes [rows, format.columns(k)] and float32 scales [rows, groups].

    Of each group of columns (those past k count as zeros), in fp32: a = max |x|, code = E4M3(x * (448 / a)), nearest,
    ties to even, saturating; scale = a / 448. Both quotients are rounded to nearest. A group with `a` below 2^-100 is
    zeros with scale 0; one with a NaN or an infinity has scale NaN and codes 0, so that whatever is multiplied with
    the row becomes NaN.
    """
    n, k = rows.shape
    groups, columns = format.groups(k), format.columns(k)
    x = np.ascontiguousarray(rows, np.float32)
    if columns != k:
        x = np.zeros((n, columns), np.float32)
        x[:, :k] = rows
    x = x.reshape(n, groups, columns // groups)
    largest = np.maximum(x.max(-1, initial=0.0), -x.min(-1, initial=0.0))  # NaN wins
    finite = np.isfinite(largest)
    used = finite & (largest >= SMALLEST)
    factor = LARGEST / np.where(used, largest, np.float32(1))
    scaled = np.where(used[:, :, None], x, np.float32(0)) if not used.all() else x
    scaled = scaled * factor[:, :, None]
    np.clip(scaled, -LARGEST, LARGEST, out=scaled)  # the product may round to just above 448, which saturates
    codes = scaled.astype(ml_dtypes.float8_e4m3fn).reshape(n, columns)
    scales = np.where(used, largest / LARGEST, np.where(finite, np.float32(0), np.float32(np.nan)))
    return codes, scales
