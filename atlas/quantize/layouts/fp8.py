"""The `fp8` layout of transformers (DeepSeek, Qwen): E4M3 in 128 x 128 blocks, scales in `weight_scale_inv`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.quantize.layouts.layout import Context, Layout
from atlas.quantize.writer import Entry
from atlas.weights.quantized import Array, QuantizedArray
from atlas.weights.quantizers import FP8_BLOCK, quantize_fp8


class Fp8Block(Layout):
    """Values are code * weight_scale_inv, whatever its name says. Blocks at the edges may be partial."""

    def entries(self, n: int, k: int) -> dict[str, Entry]:
        return {
            "weight": ("F8_E4M3", (n, k)),
            "weight_scale_inv": ("F32", (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))),
        }

    def quantize(self, values: Array, context: Context) -> QuantizedArray:
        return quantize_fp8(values, (FP8_BLOCK, FP8_BLOCK), context.name)

    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        return {"weight": array.codes, "weight_scale_inv": array.scales}

    def quantization_config(self, kept: Mapping[str, str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": sorted(kept),
        }
