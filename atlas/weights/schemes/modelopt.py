"""`quant_method` modelopt: NVIDIA ModelOpt's FP8 and NVFP4 exports, also mixed by layer.

Source: ModelOpt's `export` (hf_quant_config.json with `quantization`; config.json with the same fields flat, where
`ignore` stands for `exclude_modules`), and published checkpoints. Names of excluded modules may hold * and ?.
"""

from __future__ import annotations

import fnmatch

from atlas.weights.schemes import fp4, fp8
from atlas.weights.schemes.fields import Fields
from atlas.weights.schemes.stored import Module, QuantizedWeight

FP8 = ("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "fp8_pb_real")
NVFP4 = ("nvfp4", "w4a16_nvfp4")
MIXED = "mixed_precision"


class ModelOpt:
    """What is stored decides what a tensor is; the configuration must not say otherwise."""

    def __init__(self, config: Fields) -> None:
        if "quantization" in config.values:
            config = config.object("quantization")
        self.algorithm = config.text("quant_algo", (*FP8, *NVFP4, MIXED))
        self.excluded = config.names("exclude_modules") + config.names("ignore")
        self.layers: dict[str, str] = {}
        if self.algorithm == MIXED:
            layers = config.object("quantized_layers")
            if not layers.values:
                raise config.fail("quantized_layers", "an object with at least one layer")
            for name in layers.values:
                self.layers[name] = layers.object(name).text("quant_algo", (*FP8, *NVFP4))

    def covers(self, name: str) -> bool:
        if self.algorithm == MIXED:
            return name in self.layers
        # A name without wildcards excludes what lies below it too.
        return not any(
            fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in self.excluded
        )

    def weight(self, module: Module) -> QuantizedWeight:
        """Raises CheckpointError on pieces of another kind than the configuration names for this module."""
        stated = self.layers.get(module.name) if self.algorithm == MIXED else self.algorithm
        if "pre_quant_scale" in module:
            raise module.fail("pre_quant_scale", "scales activations, which is not done here", "weights without it")
        info = module.pieces.get("weight")
        is_fp4 = info is not None and info.dtype == "U8"
        if (stated in FP8 and is_fp4) or (stated in NVFP4 and not is_fp4):
            found = f"has type {info.dtype}" if info else "is missing"
            raise module.fail("weight", found, f"{'F8_E4M3' if stated in FP8 else 'U8'} for quant_algo {stated}")
        if is_fp4:
            return fp4.nvfp4(module, codes="weight", global_scale="weight_scale_2", divides=False)
        return fp8.weight(module)
