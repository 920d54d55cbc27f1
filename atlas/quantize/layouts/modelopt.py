"""The layouts of NVIDIA's modelopt: FP8 with a scale per tensor, and NVFP4.

Static activation scales come from calibration: FP8 needs them; NVFP4 without them is weight only (W4A16_NVFP4).
The configuration stands twice, in config.json and in hf_quant_config.json: readers know one or the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from atlas.quantize.layouts.layout import Context, Layout
from atlas.quantize.writer import Entry
from atlas.weights.quantized import Array, QuantizedArray
from atlas.weights.quantizers import E2M1_MAX, E4M3_MAX, NVFP4_GROUP, quantize_fp8, quantize_nvfp4

_PRODUCER = {"name": "atlas", "version": "1"}


class _ModelOpt(Layout):
    shares_scale = True
    algorithm: str
    weights: dict[str, Any]
    inputs: dict[str, Any] | None
    group: int | None = None

    def quantization_config(self, kept: Mapping[str, str]) -> dict[str, Any]:
        group: dict[str, Any] = {"targets": ["Linear"], "weights": self.weights}
        if self.inputs is not None:
            group["input_activations"] = self.inputs
        config: dict[str, Any] = {
            "quant_method": "modelopt",
            "quant_algo": self.algorithm,
            "config_groups": {"group_0": group},
            "ignore": sorted(kept),
            "kv_cache_scheme": None,
            "producer": _PRODUCER,
        }
        return {**config, "group_size": self.group} if self.group else config

    def files(self, kept: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        quantization: dict[str, Any] = {
            "quant_algo": self.algorithm,
            "kv_cache_quant_algo": None,
            "exclude_modules": sorted(kept),
        }
        if self.group:
            quantization["group_size"] = self.group
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}


class ModelOptFp8(_ModelOpt):
    """weight E4M3, weight_scale and input_scale of no dimensions, both multiply."""

    algorithm = "FP8"
    calibrated = True

    def __init__(self) -> None:
        self.weights = self.inputs = {"dynamic": False, "num_bits": 8, "type": "float"}

    def entries(self, n: int, k: int) -> dict[str, Entry]:
        return {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("F32", ()), "input_scale": ("F32", ())}

    def quantize(self, values: Array, context: Context) -> QuantizedArray:
        return quantize_fp8(values, (0, 0), context.name, context.absmax)

    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        return {
            "weight": array.codes,
            "weight_scale": array.scales.reshape(()),
            "input_scale": _input_scale(context, E4M3_MAX),
        }


class ModelOptNvfp4(_ModelOpt):
    """weight U8, weight_scale E4M3, weight_scale_2 (and input_scale) of no dimensions; all multiply."""

    group = NVFP4_GROUP

    def __init__(self, calibrated: bool) -> None:
        self.calibrated = calibrated
        self.algorithm = "NVFP4" if calibrated else "W4A16_NVFP4"
        self.weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
        self.inputs = self.weights if calibrated else None

    def refuses(self, n: int, k: int) -> str:
        return f"{k} columns are no multiple of {NVFP4_GROUP}" if k % NVFP4_GROUP else ""

    def entries(self, n: int, k: int) -> dict[str, Entry]:
        result: dict[str, Entry] = {
            "weight": ("U8", (n, k // 2)),
            "weight_scale": ("F8_E4M3", (n, k // NVFP4_GROUP)),
            "weight_scale_2": ("F32", ()),
        }
        return {**result, "input_scale": ("F32", ())} if self.calibrated else result

    def quantize(self, values: Array, context: Context) -> QuantizedArray:
        return quantize_nvfp4(values, context.name, context.absmax)

    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        result = {
            "weight": array.codes[:, 0::2] | array.codes[:, 1::2] << 4,
            "weight_scale": array.scales.astype(ml_dtypes.float8_e4m3fn),
            "weight_scale_2": np.array(array.global_scale, np.float32),
        }
        return {**result, "input_scale": _input_scale(context, E2M1_MAX * E4M3_MAX)} if self.calibrated else result


def _input_scale(context: Context, limit: float) -> Array:
    """Of the largest value seen to enter the matrix; 1 where nothing but zeros did."""
    assert context.input_absmax is not None
    return np.array(context.input_absmax / limit or 1.0, np.float32)
