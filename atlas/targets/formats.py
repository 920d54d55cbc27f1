"""Block formats: buffers whose dtype is a quantised format instead of an element type.

A matrix [n, k] in a block format stores codes, and per row and group of columns a scale and maybe an
offset. Row-major storage keeps each row whole, `[codes | scales | offsets | row scale]`, so that rows can be
packed and read independently; the last group is stored whole, filled up with zeros. Kernels may ask for another
layout (atlas/weights/layouts.py). `Format` says what a code means; the NumPy side is atlas/weights/quantized.py, and
how floats are rounded to E4M3 stands in atlas/weights/e4m3.py.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from atlas.targets.quant import DTYPE_BYTES

GROUP = 32
"""Columns of a group in every integer format: the finest of the checkpoints' groups that divides all others."""

ROW_GRANULE = 128
"""A row that is one group has its codes filled up to a multiple of this: a step of every product's walk over k."""


@dataclasses.dataclass(frozen=True)
class Format:
    """One block format.

    bits: of a code; 4-bit codes lie two to a byte, the even column in the low nibble.
    element: what a code is: an integer, or a number of E4M3 or E2M1.
    group: columns that share a scale; 0: all of a row.
    signed: integer codes are two's complement; otherwise 0 .. 2^bits - 1.
    bias: what is taken from every code before it is scaled, where no offset is stored.
    scale: dtype of the scales, "f16", "bf16", "f32" or "e4m3".
    zero: an integer zero point (u8) is stored: value = (code - zero) * scale.
    minimum: dtype of a stored minimum, or "": value = code * scale + minimum.
    row_scale: one more f32 scale for each row: value = code * (scale * row_scale).
    """

    name: str
    bits: int
    element: Literal["integer", "e4m3", "e2m1"] = "integer"
    group: int = GROUP
    signed: bool = False
    bias: int = 0
    scale: str = "f16"
    zero: bool = False
    minimum: str = ""
    row_scale: bool = False

    def groups(self, k: int) -> int:
        """Groups of a row of k columns."""
        return -(-k // self.group) if self.group else 1

    def columns(self, k: int) -> int:
        """Columns that a row of k has codes for: a last group of fewer columns is stored whole."""
        granule = self.group or ROW_GRANULE
        return -(-k // granule) * granule

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of k columns, row-major."""
        per_group = _SIZES[self.scale] + self.zero + _SIZES.get(self.minimum, 0)
        return self.columns(k) * self.bits // 8 + self.groups(k) * per_group + 4 * self.row_scale

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a matrix [.., k], row-major."""
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])


_SIZES = {"f16": 2, "bf16": 2, "f32": 4, "e4m3": 1}

FORMATS = {
    format.name: format
    for format in (
        Format("i8g32", 8, signed=True),  # GGUF Q8_0; compressed-tensors int8
        Format("i8g32f", 8, signed=True, scale="f32"),  # int8 whose scales f16 cannot hold
        Format("i4g32", 4, bias=8),  # GGUF Q4_0; symmetric int4
        Format("i4g32b", 4, bias=8, scale="bf16"),  # symmetric int4 with bf16 scales: compressed-tensors; made for GPUs
        Format("i4g32z", 4, zero=True),  # AWQ, GPTQ
        Format("i4g32m", 4, minimum="f16"),  # GGUF Q4_1
        Format("i4g32f", 4, scale="f32", minimum="f32"),  # GGUF Q4_K; int4 whose scales f16 cannot hold
        Format("f8", 8, "e4m3", 0, scale="f32"),  # FP8 per tensor and channel; made at load
        Format("f8g128", 8, "e4m3", 128, scale="f32"),  # FP8 in blocks of 128 x 128; activations
        Format("nvfp4", 4, "e2m1", 16, scale="e4m3", row_scale=True),  # NVFP4
    )
}
"""Every block format, by the name that buffers and kernels use."""

INTEGER_FORMATS = tuple(name for name, f in FORMATS.items() if f.element == "integer" and f.scale != "bf16")
"""Those that CPUs have products of."""

EXACT_IN = {
    "i8g32": ("i8g32", "i8g32f"),
    "i8g32f": ("i8g32f",),
    "i4g32": ("i4g32", "i4g32z", "i4g32f", "i8g32", "i8g32f"),
    "i4g32b": ("i4g32b", "i4g32f", "i8g32f"),
    "i4g32z": ("i4g32z", "i4g32f", "i8g32", "i8g32f"),
    "i4g32m": ("i4g32m", "i4g32f"),
    "i4g32f": ("i4g32f",),
    "f8": ("f8", "f8g128"),
    "f8g128": ("f8g128",),
    "nvfp4": ("nvfp4",),
}
"""Format -> the formats that hold every value of it, smallest first."""


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a row-major array of an element type or a block format."""
    if dtype in FORMATS:
        return FORMATS[dtype].nbytes(shape)
    return DTYPE_BYTES[dtype] * math.prod(shape)


def common(formats: Iterable[str], accepted: Iterable[str] = FORMATS) -> str | None:
    """The smallest of the formats in `accepted` that holds every value of all of `formats`; None if there is none."""
    choices: list[str] | None = None
    for format in formats:
        fits = EXACT_IN.get(format, ())
        choices = [c for c in (choices if choices is not None else fits) if c in fits]
    choices = [c for c in choices or () if c in accepted]
    return min(choices, key=lambda name: FORMATS[name].row_bytes(1024)) if choices else None


ROLE_FORMATS = {
    "int4": ("i4g32b", "i4g32", "i4g32z", "i4g32m"),
    "int4m": ("i4g32m", *(name for name in INTEGER_FORMATS if name != "i4g32m")),
    "int8": INTEGER_FORMATS,
    "fp8": ("f8", "f8g128"),
    "nvfp4": ("nvfp4",),
    "stored": ("bf16", *INTEGER_FORMATS),
}
"""Word for a weight role (atlas/targets/quant.py) -> the formats that its products have kernels for, first what is made
at load. What none of them holds exactly is kept as bf16, for which every product has kernels."""


COMPILED = {"int4": ("i4g32b", "i4g32z"), "fp8": ("f8",)}
"""Of ROLE_FORMATS, what GPU targets have kernels for, where that is not all of them. They hold exactly what is made at
load and what common checkpoints store (AWQ, GPTQ, compressed-tensors, GGUF's Q4_0; FP8 per tensor and channel).
Kernels for the others come in packs that are built for a checkpoint (atlas/build/checkpoint_target.py)."""

PUBLISHED = "published_formats"
"""The field of a model's facts that names what well-known checkpoints of it store, in place of COMPILED."""


def compiled_formats(role: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The formats that GPU targets of a model have kernels for, of a weight role that has a word."""
    made_at_load, *_ = every = ROLE_FORMATS[role]
    stored = facts.get(PUBLISHED, COMPILED.get(role, every))
    return tuple(format for format in every if format in (made_at_load, *stored))


def plain_format(role: str) -> str:
    """The format of a weight role where no checkpoint is at hand: what load-time quantisation would make."""
    return ROLE_FORMATS[role][0] if role in ROLE_FORMATS else role
