"""GGUF's quantised blocks as codes and scales, bit for bit.

Block layouts: ggml's `ggml-common.h` and `ggml-quants.c`, by the description in the `gguf` package
(`gguf.quants`), whose dequantisation the tests hold this against. All numbers are little-endian.

    Q4_0  d f16 | 16 bytes of nibbles                  value = (q - 8) * d
    Q4_1  d f16 | m f16 | 16 bytes of nibbles          value = q * d + m
    Q5_0  d f16 | 32 fifth bits | 16 bytes of nibbles  value = (q - 16) * d
    Q8_0  d f16 | 32 int8                              value = q * d
    Q4_K  d f16 | dmin f16 | 8 scales and 8 minimums of 6 bits | 128 bytes of nibbles
                                                       value = q * (d * sc) - dmin * m, groups of 32

Byte j of a run of nibbles holds column j in its low half and column j + 16 (Q4_K: j + 32) in its high half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from atlas.weights.quantized import QuantizedArray, Scheme

Array = npt.NDArray[Any]

SCHEMES = {
    "Q4_0": Scheme("u4", (1, 32), "f16", bias=8),
    "Q4_1": Scheme("u4", (1, 32), "f16", minimum=True),
    "Q5_0": Scheme("i8", (1, 32), "f16"),
    "Q8_0": Scheme("i8", (1, 32), "f16"),
    "Q4_K": Scheme("u4", (1, 32), "f32", minimum=True),
}
"""GGUF type -> what its blocks hold. Every other type is only dequantised."""

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q8_0": 34, "Q4_K": 144}


def unpack(kind: str, raw: Array) -> QuantizedArray:
    """Blocks of type `kind`, uint8 [n, row bytes], as codes [n, k] and float32 scales [n, k / 32]."""
    n, blocks = len(raw), _blocks(kind, raw)
    scales, rest = _f16(blocks, 0), blocks[:, :, 2:]
    zeros = minimums = None
    if kind == "Q8_0":
        codes = rest.view(np.int8).reshape(n, 32 * rest.shape[1])
    elif kind == "Q5_0":
        fifth = np.unpackbits(np.ascontiguousarray(rest[:, :, :4]), axis=-1, bitorder="little")
        codes = (_nibbles(rest[:, :, 4:]) | fifth << 4).astype(np.int8).reshape(n, 32 * rest.shape[1]) - np.int8(16)
    elif kind == "Q4_K":
        return _unpack_q4_k(blocks)
    else:
        if kind == "Q4_0":
            zeros = np.full(scales.shape, 8, np.int16)
        else:
            minimums, rest = _f16(blocks, 2), rest[:, :, 2:]
        codes = _nibbles(rest).reshape(n, 32 * rest.shape[1])
    return QuantizedArray("i8" if codes.dtype == np.int8 else "u4", codes, scales, (1, 32), zeros, minimums)


def _unpack_q4_k(blocks: Array) -> QuantizedArray:
    n, groups = len(blocks), 8 * blocks.shape[1]
    low, middle, high = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    six_bits = np.concatenate([low & 63, (high & 15) | low >> 6 << 4], axis=-1)
    six_bits_minimum = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    scales = _f16(blocks, 0)[:, :, None] * six_bits.astype(np.float32)
    minimums = -(_f16(blocks, 2)[:, :, None] * six_bits_minimum.astype(np.float32))
    codes = _nibbles(blocks[:, :, 16:].reshape(n, groups // 2, 32)).reshape(n, 32 * groups)
    return QuantizedArray("u4", codes, scales.reshape(n, groups), (1, 32), None, minimums.reshape(n, groups))


def _blocks(kind: str, raw: Array) -> Array:
    """[n, row bytes] -> [n, blocks, bytes of a block]; sizes spelled out, as n may be 0."""
    size = _BLOCK_BYTES[kind]
    return raw.reshape(len(raw), raw.shape[1] // size, size)


def _nibbles(packed: Array) -> Array:
    """[.., w] bytes -> [.., 2 w] codes: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _f16(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of every block, as float32 [n, blocks per row]."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0].astype(np.float32)
