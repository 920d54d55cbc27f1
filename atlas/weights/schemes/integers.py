"""compressed-tensors' integer weights: packed (pack-quantized) and plain int8 (int-quantized, naive-quantized).

Source: the compressed-tensors package, `compressors/pack_quantized`. weight_packed int32 [n, ceil(k * bits / 32)]
holds signed codes plus 2^(bits - 1), the first column in the lowest bits; weight_zero_point is packed likewise along
its rows, int32 [ceil(n * bits / 32), groups] (older files: int8 [n, groups]); weight_shape is [n, k]; weight_g_idx,
which older files with act-order have, is the group of every column. value = (code - zero point) * scale.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from atlas.weights.quantized import QuantizedArray
from atlas.weights.schemes.stored import (
    FLOAT_SCALES,
    Array,
    Load,
    Module,
    QuantizedWeight,
    integer_array,
    integer_scheme,
    unpack_words,
)

PACKED_BITS = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What `weights` of a config group says. group: columns, 0 for a whole row, -1 for the whole tensor."""

    bits: int
    group: int
    symmetric: bool


def weight(module: Module, how: Arguments) -> QuantizedWeight:
    """Raises CheckpointError on pieces that are missing or of other types or shapes than `how` implies."""
    packed = "weight_packed" in module
    per_word = 32 // how.bits
    codes = (
        module.take("weight_packed", ("I32",), [None, None]) if packed else module.take("weight", ("I8",), [None, None])
    )
    n, k = _shape(module, codes.shape, per_word) if packed else codes.shape
    size = how.group if how.group > 0 else k
    groups = -(-k // size)
    shape = (1, 1) if how.group < 0 else (n, groups)
    forms = [[], [1], [1, 1]] if how.group < 0 else [[n, groups], *([[n]] if groups == 1 else [])]
    scale = module.take("weight_scale", FLOAT_SCALES, *forms, why=f"groups of {size} columns")
    index = module.group_index("weight_g_idx", k, groups, size) if how.group > 0 else None
    packed_zeros = not how.symmetric and module.pieces.get("weight_zero_point", codes).dtype == "I32"
    if not how.symmetric:
        forms = [[-(-n // per_word), groups]] if packed_zeros else forms
        module.take("weight_zero_point", ("I32",) if packed_zeros else ("I8",), *forms, why="the weight is asymmetric")

    def read(load: Load, begin: int, end: int) -> QuantizedArray:
        whole_tensor = how.group < 0 and (begin, end) == (0, n)
        rows = slice(None) if whole_tensor else slice(begin, end) if how.group >= 0 else np.zeros(end - begin, int)
        scales = load(scale.name).reshape(shape)[rows]
        middle = 1 << (how.bits - 1)
        if how.symmetric:
            zeros: Array = np.broadcast_to(np.int16(middle), scales.shape)
        else:
            stored = load(f"{module.name}.weight_zero_point")
            if packed_zeros:
                zeros = unpack_words(stored.T, how.bits)[:, :n].T[rows]
            else:
                zeros = stored.reshape(shape)[rows].astype(np.int16) + middle
        stored = load(codes.name)[begin:end]
        array = unpack_words(stored, how.bits)[:, :k] if packed else stored.view(np.uint8) ^ np.uint8(128)
        return integer_array(how.bits, array, scales, (n if whole_tensor else 1, size), zeros, index)

    group = (0, 0) if how.group < 0 else (1, 0 if groups == 1 else size)
    scheme = integer_scheme(how.bits, scale, group, not how.symmetric, index is not None)
    return QuantizedWeight(codes, (n, k), scheme, read)


def _shape(module: Module, packed: tuple[int, ...], per_word: int) -> tuple[int, int]:
    """weight_shape, held against the packed codes; what they imply where it is absent."""
    if "weight_shape" not in module:
        return packed[0], per_word * packed[1]
    module.take("weight_shape", ("I64", "I32"), [2])
    n, k = (int(size) for size in module.values("weight_shape"))
    if n != packed[0] or k < 1 or -(-k // per_word) != packed[1]:
        raise module.fail("weight_shape", f"is {[n, k]}", f"a shape that fits weight_packed {list(packed)}")
    return n, k
