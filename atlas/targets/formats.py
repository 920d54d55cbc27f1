"""Block formats: weight buffers whose dtype is a quantised format instead of an element type.

A matrix [n, k] in a block format stores codes, and per row and group of 32 columns a scale and maybe an
offset. Row-major storage keeps each row whole, `[codes | scales | offsets]`, so that rows can be packed and
read independently; kernels may ask for another layout (atlas/weights/layouts.py). `Format` says
what a code means; the NumPy side is atlas/weights/quantized.py. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from atlas.targets.quant import DTYPE_BYTES

GROUP = 32
"""Columns of a group in every block format: the finest of the checkpoints' groups that divides all others."""


@dataclasses.dataclass(frozen=True)
class Format:
    """One block format.

    bits: of a code; 4-bit codes lie two to a byte, the even column in the low nibble.
    signed: codes are two's complement; otherwise 0 .. 2^bits - 1.
    bias: what is taken from every code before it is scaled, where no offset is stored.
    scale: dtype of the scales, "f16" or "f32".
    zero: an integer zero point (u8) is stored: value = (code - zero) * scale.
    minimum: dtype of a stored minimum, or "": value = code * scale + minimum.
    """

    name: str
    bits: int
    signed: bool = False
    bias: int = 0
    scale: str = "f16"
    zero: bool = False
    minimum: str = ""

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of k columns, row-major; a last group of fewer columns is stored whole."""
        groups = -(-k // GROUP)
        per_group = GROUP * self.bits // 8 + _SIZES[self.scale] + self.zero + _SIZES.get(self.minimum, 0)
        return groups * per_group

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a matrix [.., k], row-major."""
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])


_SIZES = {"f16": 2, "f32": 4}

FORMATS = {
    format.name: format
    for format in (
        Format("i8g32", 8, signed=True),  # GGUF Q8_0; compressed-tensors int8
        Format("i8g32f", 8, signed=True, scale="f32"),  # int8 whose scales f16 cannot hold
        Format("i4g32", 4, bias=8),  # GGUF Q4_0; symmetric int4
        Format("i4g32z", 4, zero=True),  # AWQ, GPTQ
        Format("i4g32m", 4, minimum="f16"),  # GGUF Q4_1
        Format("i4g32f", 4, scale="f32", minimum="f32"),  # GGUF Q4_K; int4 whose scales f16 cannot hold
    )
}
"""Every block format, by the name that buffers and kernels use."""

INTEGER_FORMATS = tuple(FORMATS)

EXACT_IN = {
    "i8g32": ("i8g32", "i8g32f"),
    "i8g32f": ("i8g32f",),
    "i4g32": ("i4g32", "i4g32z", "i4g32f", "i8g32", "i8g32f"),
    "i4g32z": ("i4g32z", "i4g32f", "i8g32", "i8g32f"),
    "i4g32m": ("i4g32m", "i4g32f"),
    "i4g32f": ("i4g32f",),
}
"""Format -> the formats that hold every value of it, smallest first."""


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a row-major array of an element type or a block format."""
    if dtype in FORMATS:
        return FORMATS[dtype].nbytes(shape)
    return DTYPE_BYTES[dtype] * math.prod(shape)


def common(formats: Iterable[str]) -> str | None:
    """The smallest format that holds every value of all of `formats`; None if there is none."""
    choices: list[str] | None = None
    for format in formats:
        fits = EXACT_IN.get(format, ())
        choices = [c for c in (choices if choices is not None else fits) if c in fits]
    return min(choices, key=lambda name: FORMATS[name].row_bytes(GROUP)) if choices else None
