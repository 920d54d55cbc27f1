"""GPTQ, AutoGPTQ's and GPTQModel's layout.

Source: AutoGPTQ `QuantLinear`, GPTQModel `BaseQuantLinear`. qweight int32 [k * bits / 32, n], the first row of
codes in the lowest bits; qzeros int32 [groups, n * bits / 32]; scales [groups, n]; g_idx int32 [k], the group of
every row of codes, which act-order permutes. value = (code - zero) * scale. checkpoint_format "gptq" stores every
zero point minus one, "gptq_v2" as it is.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from atlas.weights.quantized import QuantizedArray
from atlas.weights.schemes.fields import Fields
from atlas.weights.schemes.stored import (
    FLOAT_SCALES,
    Load,
    Module,
    QuantizedWeight,
    integer_array,
    integer_scheme,
    unpack_words,
)

BITS = (2, 4, 8)


class Gptq:
    """`quant_method` gptq; also AutoGPTQ's older quantize_config.json."""

    def __init__(self, config: Fields) -> None:
        self.bits = config.integer("bits", BITS)
        self.group = config.group_size(default=-1)
        self.symmetric = config.flag("sym", True)
        self.act_order = config.flag("desc_act", False)
        self.stored_minus = 1 if config.text("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq" else 0
        self.dynamic = [(rule, _pattern(config, rule)) for rule in config.object("dynamic").values]
        self.config = config
        # transformers: names within a block, in lists by order of quantisation.
        inside = config.get("modules_in_block_to_quantize") or []
        self.inside = [name for entry in inside for name in (entry if isinstance(entry, list) else [entry])]

    def covers(self, name: str) -> bool:
        skipped = any(rule.startswith("-:") and pattern.match(name) for rule, pattern in self.dynamic)
        return not skipped and (not self.inside or any(name.endswith(str(inside)) for inside in self.inside))

    def _rules(self, name: str) -> tuple[int, int, bool]:
        """bits, group size and symmetry of a module: GPTQModel's `dynamic` may override them by name."""
        for rule, pattern in self.dynamic:
            if not rule.startswith("-:") and pattern.match(name):
                own = self.config.object("dynamic").object(rule)
                return (
                    own.integer("bits", BITS, self.bits),
                    own.group_size(default=self.group),
                    own.flag("sym", self.symmetric),
                )
        return self.bits, self.group, self.symmetric

    def weight(self, module: Module) -> QuantizedWeight:
        """Raises CheckpointError on pieces of other types or shapes, and on a g_idx that names no group."""
        bits, group, symmetric = self._rules(module.name)
        per_word = 32 // bits
        codes = module.take("qweight", ("I32",), [None, None])
        k, n = per_word * codes.shape[0], codes.shape[1]
        size = k if group == -1 else group
        groups = -(-k // size)
        zero = module.take("qzeros", ("I32",), [groups, -(-n // per_word)], why=f"{bits} bits, groups of {size} rows")
        scale = module.take("scales", FLOAT_SCALES, [groups, n], why=f"groups of {size} rows")
        if self.act_order and groups > 1 and "g_idx" not in module:
            raise module.fail("g_idx", "is missing although desc_act is true", "the group of every row of codes")
        index = module.group_index("g_idx", k, groups, size)

        def read(load: Load, begin: int, end: int) -> QuantizedArray:
            first = begin // per_word
            words = load(zero.name)[:, first : -(-end // per_word)]
            zeros = unpack_words(words, bits)[:, begin - first * per_word :][:, : end - begin].T
            # The largest code stands for zero point 0, from which one was taken.
            zeros = (zeros + np.uint8(self.stored_minus)) & np.uint8((1 << bits) - 1)
            if symmetric and zeros.size and (zeros != 1 << (bits - 1)).any():
                found = int(zeros[zeros != 1 << (bits - 1)][0])
                raise module.fail(
                    "qzeros",
                    f"holds zero point {found} although sym is true",
                    f"{1 << (bits - 1)} everywhere",
                    "correct sym or checkpoint_format in the quantisation config",
                )
            return integer_array(
                bits,
                unpack_words(load(codes.name)[:, begin:end].T, bits),
                load(scale.name)[:, begin:end].T,
                (1, size),
                zeros,
                index,
            )

        spec = integer_scheme(bits, scale, (1, 0 if groups == 1 else size), not symmetric, index is not None)
        return QuantizedWeight(codes, (n, k), spec, read)


def _pattern(config: Fields, rule: Any) -> re.Pattern[str]:
    try:
        return re.compile(str(rule).removeprefix("+:").removeprefix("-:"))
    except re.error:
        raise config.fail("dynamic", "an object with regular expressions as keys") from None
