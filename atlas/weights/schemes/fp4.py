"""E2M1 weights, two to a byte with the even column in the low half: NVFP4 and MXFP4.

Sources: ModelOpt's `quantize_weight_per_block` export (`weight` U8, `weight_scale` E4M3 per 16 columns,
`weight_scale_2` float32, multiplied); compressed-tensors nvfp4-pack-quantized (`weight_packed`, `weight_scale`,
`weight_global_scale`, divided by) and mxfp4-pack-quantized (`weight_scale` uint8, a power of two per 32 columns);
OCP Microscaling Formats, v1.0.
"""

from __future__ import annotations

import math

import numpy as np

from atlas.weights.quantized import QuantizedArray, Scheme
from atlas.weights.schemes.fp8 import exponent
from atlas.weights.schemes.stored import Load, Module, QuantizedWeight, unpack_words

GROUP = 16
_SCALAR: tuple[list[int], ...] = ([], [1], [1, 1])


def nvfp4(module: Module, *, codes: str, global_scale: str, divides: bool) -> QuantizedWeight:
    """An NVFP4 weight [n, k]; `codes` and `global_scale` name its pieces."""
    info = module.take(codes, ("U8",), [None, None])
    n, k = info.shape[0], 2 * info.shape[1]
    module.take("weight_scale", ("F8_E4M3",), [n, -(-k // GROUP)], why="one scale per 16 columns")
    module.take(global_scale, ("F32",), *_SCALAR)
    factor = float(module.values(global_scale).reshape(()))
    if not math.isfinite(factor) or factor <= 0:
        raise module.fail(global_scale, f"is {factor}", "a finite number above 0")
    factor = 1 / factor if divides else factor

    def read(load: Load, begin: int, end: int) -> QuantizedArray:
        scales = load(f"{module.name}.weight_scale")[begin:end].astype(np.float32)
        array = unpack_words(load(info.name)[begin:end], 4)
        return QuantizedArray("e2m1", array, scales, (1, GROUP), global_scale=factor)

    return QuantizedWeight(info, (n, k), Scheme("e2m1", (1, GROUP), "e4m3", global_scale=True), read)


def mxfp4(module: Module) -> QuantizedWeight:
    """An MXFP4 weight [n, k] of compressed-tensors."""
    info = module.take("weight_packed", ("U8",), [None, None])
    n, k = info.shape[0], 2 * info.shape[1]
    module.take("weight_scale", ("U8", "F8_E8M0"), [n, -(-k // 32)], why="one scale per 32 columns")

    def read(load: Load, begin: int, end: int) -> QuantizedArray:
        scales = exponent(load(f"{module.name}.weight_scale")[begin:end].view(np.uint8))
        return QuantizedArray("e2m1", unpack_words(load(info.name)[begin:end], 4), scales, (1, 32))

    return QuantizedWeight(info, (n, k), Scheme("e2m1", (1, 32), "e8m0"), read)
