"""The compressed-tensors layouts (llm-compressor, vLLM, transformers): int4, int8, FP8, NVFP4.

Source: the `compressed-tensors` package, whose `decompress` is the definition; tests hold this to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from atlas.quantize.layouts.layout import Context, Layout, pack_int32, words
from atlas.quantize.writer import Entry
from atlas.weights.quantized import Array, QuantizedArray
from atlas.weights.quantizers import (
    FP8_BLOCK,
    NVFP4_GROUP,
    Scheme4,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nvfp4,
)

SCALES = "f16+bf16"
"""Integer scales are stored as F16, with values that bf16 holds too: they survive a reader's cast to either."""


def _arguments(bits: int, kind: str, strategy: str, **changes: Any) -> dict[str, Any]:
    """QuantizationArgs of compressed-tensors, every field stated."""
    arguments = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": None,
        "observer_kwargs": {},
    }
    return {**arguments, **changes}


class _CompressedTensors(Layout):
    format: str
    weights: dict[str, Any]
    inputs: dict[str, Any] | None = None

    def quantization_config(self, kept: Mapping[str, str]) -> dict[str, Any]:
        group = {
            "targets": ["Linear"],
            "weights": self.weights,
            "input_activations": self.inputs,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted(kept),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


class PackQuantized(_CompressedTensors):
    """Integers of 4 or 8 bits in int32 words, weight only; groups along k."""

    format = "pack-quantized"

    def __init__(self, bits: int, group: int, symmetric: bool = True) -> None:
        self.bits, self.group, self.symmetric = bits, group, symmetric
        self.weights = _arguments(bits, "int", "group", group_size=group, symmetric=symmetric)

    def refuses(self, n: int, k: int) -> str:
        return f"{k} columns are no multiple of the group, {self.group}" if k % self.group else ""

    def entries(self, n: int, k: int) -> dict[str, Entry]:
        groups = k // self.group
        result: dict[str, Entry] = {
            "weight_packed": ("I32", (n, words(k, self.bits))),
            "weight_scale": ("F16", (n, groups)),
            "weight_shape": ("I64", (2,)),
        }
        if not self.symmetric:
            result["weight_zero_point"] = ("I32", (words(n, self.bits), groups))
        return result

    def quantize(self, values: Array, context: Context) -> QuantizedArray:
        if self.bits == 8:
            return quantize_int8(values, self.group, SCALES, context.name)
        scheme: Scheme4 = "symmetric" if self.symmetric else "zero"
        return quantize_int4(values, self.group, scheme, SCALES, context.name, context.importance)

    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        codes = array.codes if self.bits == 4 else (array.codes.astype(np.int16) + 128).astype(np.uint8)
        result = {
            "weight_packed": pack_int32(codes, self.bits),
            "weight_scale": array.scales.astype(np.float16),
            "weight_shape": np.array(array.shape, np.int64),
        }
        if not self.symmetric:
            assert array.zeros is not None
            result["weight_zero_point"] = pack_int32(array.zeros.T.astype(np.uint8), self.bits).T
        return result


class IntQuantized(_CompressedTensors):
    """int8 per output channel; activations are rounded to int8 per token by who runs it."""

    format = "int-quantized"

    def __init__(self) -> None:
        self.weights = _arguments(8, "int", "channel")
        self.inputs = _arguments(8, "int", "token", dynamic=True)

    def entries(self, n: int, k: int) -> dict[str, Entry]:
        return {"weight": ("I8", (n, k)), "weight_scale": ("F16", (n, 1))}

    def quantize(self, values: Array, context: Context) -> QuantizedArray:
        return quantize_int8(values, 0, SCALES, context.name)

    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        return {"weight": array.codes, "weight_scale": array.scales.astype(np.float16)}


class FloatQuantized(_CompressedTensors):
    """FP8 per output channel, per tensor or in 128 x 128 blocks; activations dynamic."""

    format = "float-quantized"

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        self.shares_scale = strategy == "tensor"
        block = {"block_structure": [FP8_BLOCK, FP8_BLOCK]} if strategy == "block" else {}
        self.weights = _arguments(8, "float", strategy, **block)
        if strategy == "block":
            self.inputs = _arguments(8, "float", "group", dynamic=True, group_size=FP8_BLOCK)
        else:
            self.inputs = _arguments(8, "float", "token", dynamic=True)

    def entries(self, n: int, k: int) -> dict[str, Entry]:
        scales = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))}
        return {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("F32", scales[self.strategy])}

    def quantize(self, values: Array, context: Context) -> QuantizedArray:
        group = {"tensor": (0, 0), "channel": (1, 0), "block": (FP8_BLOCK, FP8_BLOCK)}[self.strategy]
        return quantize_fp8(values, group, context.name, context.absmax)

    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        scales = array.scales.reshape(-1) if self.strategy == "tensor" else array.scales
        return {"weight": array.codes, "weight_scale": scales}


class Nvfp4Packed(_CompressedTensors):
    """NVFP4, weight only (W4A16). The global scale is stored as its reciprocal."""

    format = "nvfp4-pack-quantized"
    shares_scale = True

    def __init__(self) -> None:
        self.weights = _arguments(4, "float", "tensor_group", group_size=NVFP4_GROUP)

    def refuses(self, n: int, k: int) -> str:
        return f"{k} columns are no multiple of {NVFP4_GROUP}" if k % NVFP4_GROUP else ""

    def entries(self, n: int, k: int) -> dict[str, Entry]:
        return {
            "weight_packed": ("U8", (n, k // 2)),
            "weight_scale": ("F8_E4M3", (n, k // NVFP4_GROUP)),
            "weight_global_scale": ("F32", (1,)),
        }

    def quantize(self, values: Array, context: Context) -> QuantizedArray:
        return quantize_nvfp4(values, context.name, context.absmax, reciprocal=True)

    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        return {
            "weight_packed": array.codes[:, 0::2] | array.codes[:, 1::2] << 4,
            "weight_scale": array.scales.astype(ml_dtypes.float8_e4m3fn),
            "weight_global_scale": np.array([1 / array.global_scale], np.float32),
        }
