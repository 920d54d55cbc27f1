"""Matrices in block formats as panels of 16 rows: what layout "panel16" means for them.

A panel is a list of blocks, one for every group of 32 columns, and `block_dtype` is a block. Its codes are
lanes of 4 bytes, a lane the next columns of one row, so that one vector of 16 lanes is 16 rows:
8-bit codes [8][16][4], each code + 128; 4-bit codes [4][16][4] bytes, of which byte [s][row][i] has column
4 s + i in its low nibble and 16 + 4 s + i in its high one. Rows past n are zero bytes.
kernels/cpu/include/atlas/blocks.h is the other side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.targets.formats import GROUP, Format
from atlas.weights.quantized import BlockArray, QuantizedArray, to_rows

Array = np.ndarray[Any, Any]

ROWS = 16
_NUMPY = {"f16": "<f2", "f32": "<f4"}


def block_dtype(format: Format) -> np.dtype[Any]:
    """A block as a structured dtype: codes, scales, and zeros or minimums where the format has them."""
    fields: list[Any] = [("codes", "<u4", (format.bits, ROWS)), ("scales", _NUMPY[format.scale], (ROWS,))]
    if format.zero:
        fields.append(("zeros", "u1", (ROWS,)))
    if format.minimum:
        fields.append(("minimums", _NUMPY[format.minimum], (ROWS,)))
    return np.dtype(fields)


def pack(array: QuantizedArray, format: Format) -> Array:
    """The stored form of `array.to_format(format.name)`: uint8 [ceil(n / 16), groups * bytes of a block]."""
    n, blocks = len(array.codes), array.to_format(format.name)
    groups = blocks.codes.shape[1] // GROUP
    if format.bits == 8:
        codes = blocks.codes.view(np.uint8) ^ np.uint8(128)
    else:
        halves = blocks.codes.reshape(n, groups, 2, GROUP // 2)
        codes = np.left_shift(halves[:, :, 1], 4, dtype=np.uint8)
        codes |= halves[:, :, 0]
    lanes = codes.reshape(n, -1).view(np.uint32).reshape(n, groups, format.bits)
    packed = np.zeros((-(-n // ROWS), groups), block_dtype(format))
    values = {"scales": blocks.scales, "zeros": blocks.zeros, "minimums": blocks.minimums}
    fields = {name: array for name, array in values.items() if array is not None}
    for i, panel in enumerate(packed):  # a panel fits the cache, a transpose of the whole does not
        begin, end = i * ROWS, min(n, (i + 1) * ROWS)
        panel["codes"][:, :, : end - begin] = lanes[begin:end].transpose(1, 2, 0)
        for name in packed.dtype.names[1:]:
            panel[name][:, : end - begin] = fields[name][begin:end].T
    return packed.view(np.uint8)


def unpack(raw: Array, n: int, k: int, format: Format) -> BlockArray:
    """The matrix [n, k] from its stored form, row-major."""
    groups = -(-k // GROUP)
    packed = raw.reshape(-1).view(np.uint8).view(block_dtype(format)).reshape(-1, groups)
    codes = np.ascontiguousarray(packed["codes"].transpose(0, 3, 1, 2)).view(np.uint8)
    codes = codes.reshape(-1, groups, format.bits * 4)[:n]
    if format.bits == 8:
        codes = (codes ^ np.uint8(128)).view(np.int8)
    else:
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
    fields = {
        name: packed[name].transpose(0, 2, 1).reshape(-1, groups)[:n]
        for name in packed.dtype.names or ()
        if name != "codes"
    }
    scales = fields["scales"].astype(np.float32)
    zeros = fields["zeros"].astype(np.int16) if format.zero else None
    if format.bias:
        zeros = np.full(scales.shape, format.bias, np.int16)
    minimums = fields["minimums"].astype(np.float32) if format.minimum else None
    code: Any = "i8" if format.signed else "u4"
    array = QuantizedArray(code, codes.reshape(n, -1)[:, :k], scales, (1, GROUP), zeros, minimums)
    return BlockArray(to_rows(array, format.name), format, k)
