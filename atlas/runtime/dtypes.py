"""Element types of buffers as NumPy dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

NUMPY: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "i64": np.dtype(np.int64),
}
