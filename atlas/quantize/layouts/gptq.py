"""The GPTQ and AWQ layouts of 4-bit integers: codes of eight rows or columns in an int32, scales float16.

Sources: AutoGPTQ's and AutoAWQ's packing, as vLLM and transformers read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas.quantize.layouts.compressed_tensors import SCALES
from atlas.quantize.layouts.layout import Context, Layout, pack_int32, words
from atlas.quantize.writer import Entry
from atlas.weights.quantized import Array, QuantizedArray
from atlas.weights.quantizers import Scheme4, quantize_int4

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of an octet whose code stands in nibble i of its word."""


class _Int4Words(Layout):
    def __init__(self, group: int, symmetric: bool) -> None:
        self.group, self.symmetric = group, symmetric

    def refuses(self, n: int, k: int) -> str:
        if k % self.group:
            return f"{k} columns are no multiple of the group, {self.group}"
        return f"{n} rows are no multiple of 8" if n % 8 else ""

    def quantize(self, values: Array, context: Context) -> QuantizedArray:
        scheme: Scheme4 = "symmetric" if self.symmetric else "zero"
        return quantize_int4(values, self.group, scheme, SCALES, context.name, context.importance)


class Gptq(_Int4Words):
    """qweight [k / 8, n], qzeros [groups, n / 8] that hold zero - 1, scales [groups, n], g_idx [k]."""

    def entries(self, n: int, k: int) -> dict[str, Entry]:
        groups = k // self.group
        return {
            "qweight": ("I32", (words(k, 4), n)),
            "qzeros": ("I32", (groups, words(n, 4))),
            "scales": ("F16", (groups, n)),
            "g_idx": ("I32", (k,)),
        }

    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        assert array.zeros is not None
        return {
            "qweight": pack_int32(array.codes, 4).T,
            "qzeros": pack_int32((array.zeros.T - 1).astype(np.uint8), 4),
            "scales": array.scales.T.astype(np.float16),
            "g_idx": (np.arange(array.shape[1]) // self.group).astype(np.int32),
        }

    def quantization_config(self, kept: Mapping[str, str]) -> dict[str, Any]:
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": self.group,
            "desc_act": False,
            "sym": self.symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
        # The head is never quantised here; what else is kept has no other place in this layout.
        others = sorted(set(kept) - {"lm_head"})
        if others:
            config["dynamic"] = {f"-:^{re.escape(module)}$": {} for module in others}
        return config


class Awq(_Int4Words):
    """qweight [k, n / 8], qzeros [groups, n / 8], scales [groups, n]; the eight columns of a word are interleaved."""

    def __init__(self, group: int) -> None:
        super().__init__(group, symmetric=False)

    def entries(self, n: int, k: int) -> dict[str, Entry]:
        groups = k // self.group
        return {
            "qweight": ("I32", (k, words(n, 4))),
            "qzeros": ("I32", (groups, words(n, 4))),
            "scales": ("F16", (groups, n)),
        }

    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        assert array.zeros is not None
        return {
            "qweight": _interleaved(array.codes.T),
            "qzeros": _interleaved(array.zeros.T.astype(np.uint8)),
            "scales": array.scales.T.astype(np.float16),
        }

    def quantization_config(self, kept: Mapping[str, str]) -> dict[str, Any]:
        others = sorted(set(kept) - {"lm_head"})
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head", *others],
        }


def _interleaved(codes: Array) -> Array:
    """Codes [rows, n] as int32 [rows, n / 8] in AWQ's order."""
    rows, n = codes.shape
    return pack_int32(codes.reshape(rows, n // 8, 8)[:, :, list(AWQ_ORDER)].reshape(rows, n), 4)
