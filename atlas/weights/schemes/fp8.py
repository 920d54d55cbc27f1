"""FP8 weights: E4M3 codes with one scale per tensor, output channel, block, or group of columns.

Sources: transformers' FineGrainedFP8Config (`quant_method: fp8`; `weight_scale_inv`, which in spite of its name
multiplies, one per block of `weight_block_size`, blocks at the edges partial); DeepSeek-V3's model card (the same
layout); fbgemm_fp8 (`weight_scale` [n, 1]); compressed-tensors float-quantized, ModelOpt FP8 (`weight_scale`).
"""

from __future__ import annotations

import numpy as np

from atlas.weights.quantized import QuantizedArray, Scheme
from atlas.weights.schemes.fields import Fields
from atlas.weights.schemes.stored import FLOAT_SCALES, SCALE_DTYPES, Load, Module, QuantizedWeight

BLOCK = (128, 128)
_SCALES = ("weight_scale_inv", "weight_scale")


def weight(module: Module, block: tuple[int, int] | None = None, columns: int = 0) -> QuantizedWeight:
    """An FP8 weight; which scale it has follows from the scale's shape.

    block: rows and columns of a block, where the configuration says; 128 x 128 is tried without it.
    columns: of a group of one row (MXFP8), 0 where there are none.

    Raises:
        CheckpointError: no scale, two of them, or one of another type or shape.
    """
    codes = module.take("weight", ("F8_E4M3",), [None, None])
    n, k = codes.shape
    names = [name for name in _SCALES if name in module]
    if len(names) != 1:
        raise module.fail("weight", f"has the scales {', '.join(names) or 'nothing'}", "one of " + ", ".join(_SCALES))
    piece, [rows, cols] = names[0], block or BLOCK
    blocks = (-(-n // rows), -(-k // cols))
    forms: dict[tuple[int, ...], tuple[int, int]] = {}
    if columns:
        forms[n, -(-k // columns)] = (1, columns)
    else:
        if block is None:
            forms |= {(1, 1): (0, 0), (n,): (1, 0), (n, 1): (1, 0)}
        forms |= {blocks: (rows, cols), (blocks[0], 1, blocks[1], 1): (rows, cols)}
        forms |= {(): (0, 0), (1,): (0, 0)}
    info = module.take(piece, (*FLOAT_SCALES, "F8_E8M0", *(("U8",) if columns else ())), *forms)
    group = forms[info.shape]
    whole = (group[0] or n, group[1] or k)
    shape = (-(-n // whole[0]), -(-k // whole[1]))

    def read(load: Load, begin: int, end: int) -> QuantizedArray:
        scales = load(f"{module.name}.{piece}").reshape(shape)
        values = exponent(scales) if info.dtype == "U8" else scales.astype(np.float32)
        array = QuantizedArray("e4m3", load(codes.name), values, whole)
        return array if (begin, end) == (0, n) else array.rows(begin, end)

    return QuantizedWeight(codes, (n, k), Scheme("e4m3", group, SCALE_DTYPES.get(info.dtype, "e8m0")), read)


def exponent(raw: np.ndarray) -> np.ndarray:
    """E8M0 scales stored as uint8: 2^(code - 127), 255 is NaN (OCP Microscaling Formats, v1.0)."""
    return np.where(raw == 255, np.float32(np.nan), np.exp2(raw.astype(np.float32) - 127)).astype(np.float32)


class Fp8:
    """`quant_method` fp8 and fbgemm_fp8. Scales of activations are not read: activations stay as they are."""

    def __init__(self, config: Fields) -> None:
        config.text("fmt", ("e4m3",), "e4m3")
        config.text("activation_scheme", ("dynamic", "static"), "dynamic")
        sizes = config.get("weight_block_size")
        self.block = None if sizes is None else config.block("weight_block_size", sizes)
        self.skipped = config.names("modules_to_not_convert") + config.names("ignored_layers")

    def covers(self, name: str) -> bool:
        return not any(skipped in name for skipped in self.skipped)

    def weight(self, module: Module) -> QuantizedWeight:
        return weight(module, self.block)
