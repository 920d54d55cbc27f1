"""AWQ, AutoAWQ's "gemm" layout.

Source: AutoAWQ `WQLinear_GEMM`. qweight int32 [k, n / 8]: nibble i of a word, from the low bits up, is output
column 0 2 4 6 1 3 5 7 [i] of the word's eight; qzeros int32 [groups, n / 8] in the same order; scales
[groups, n]. value = (code - zero) * scale; zero points are stored as they are.
"""

from __future__ import annotations

import numpy as np

from atlas.weights.quantized import QuantizedArray
from atlas.weights.schemes.fields import Fields
from atlas.weights.schemes.stored import (
    FLOAT_SCALES,
    Array,
    Load,
    Module,
    QuantizedWeight,
    integer_array,
    integer_scheme,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq:
    """`quant_method` awq; also AutoAWQ's older quant_config.json (w_bit, q_group_size)."""

    def __init__(self, config: Fields) -> None:
        config.integer("w_bit" if "w_bit" in config.values else "bits", (4,))
        self.group = config.group_size("q_group_size" if "q_group_size" in config.values else "group_size")
        config.text("version", ("gemm",), "gemm")
        if not config.flag("zero_point", True):
            raise config.fail("zero_point", "true")
        self.skipped = config.names("modules_to_not_convert")

    def covers(self, name: str) -> bool:
        return not any(skipped in name for skipped in self.skipped)

    def weight(self, module: Module) -> QuantizedWeight:
        """Raises CheckpointError on pieces of other types or shapes."""
        codes = module.take("qweight", ("I32",), [None, None])
        k, n = codes.shape[0], 8 * codes.shape[1]
        size = k if self.group == -1 else self.group
        groups = -(-k // size)
        module.take("qzeros", ("I32",), [groups, n // 8], why=f"groups of {size} rows")
        scale = module.take("scales", FLOAT_SCALES, [groups, n], why=f"groups of {size} rows")

        def read(load: Load, begin: int, end: int) -> QuantizedArray:
            return integer_array(
                4,
                _columns(load(codes.name), begin, end),
                load(scale.name)[:, begin:end].T,
                (1, size),
                _columns(load(f"{module.name}.qzeros"), begin, end),
            )

        group = (1, 0 if groups == 1 else size)
        return QuantizedWeight(codes, (n, k), integer_scheme(4, scale, group, zero=True), read)


def _columns(words: Array, begin: int, end: int) -> Array:
    """Columns [begin, end) of packed [rows, n / 8], transposed: uint8 [end - begin, rows]."""
    first = begin // 8
    turned = np.ascontiguousarray(words[:, first : -(-end // 8)].T)
    codes = np.empty((len(turned), 8, turned.shape[1]), np.uint8)
    for nibble, column in enumerate(ORDER):
        codes[:, column] = turned >> np.int32(4 * nibble) & np.int32(15)
    return codes.reshape(8 * len(turned), turned.shape[1])[begin - 8 * first :][: end - begin]
