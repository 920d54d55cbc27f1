"""`quant_method` compressed-tensors: groups of modules, each with its own way of storing weights.

Source: the compressed-tensors package, `quantization/quant_config.py`, `quant_args.py` and `utils/match.py`.
"""

from __future__ import annotations

import dataclasses
import re

from atlas.weights.schemes import fp4, fp8, integers
from atlas.weights.schemes.fields import Fields
from atlas.weights.schemes.stored import Module, QuantizedWeight

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_CLASSES = {"Linear": "", "Embedding": "embed_tokens", "ParallelLMHead": "lm_head"}
"""Module classes that may be targets, and what names of such modules end in."""


@dataclasses.dataclass(frozen=True)
class _Group:
    """One of config_groups. bits, kind: "int" or "float". columns, block: of a group, 0 and None where not stated."""

    targets: list[str]
    bits: int
    kind: str
    strategy: str
    columns: int
    block: tuple[int, int] | None
    symmetric: bool


class CompressedTensors:
    """Which group a module belongs to; ignored modules that have quantised pieces all the same are read by theirs."""

    def __init__(self, config: Fields) -> None:
        config.text("format", FORMATS, "mixed-precision")
        config.text("quantization_status", ("compressed", "frozen"), "compressed")
        if config.object("sparsity_config").values:
            config.object("sparsity_config").text("format", ("dense",), "dense")
        if config.object("transform_config").object("config_groups").values:
            raise config.fail("transform_config", "none: rotations of activations are not applied")
        self.file = config.file
        self.ignored = config.names("ignore")
        groups = config.object("config_groups")
        if not groups.values:
            raise config.fail("config_groups", "an object with at least one group")
        self.groups = [group for name in groups.values if (group := _group(groups.object(name)))]
        for pattern in [*self.ignored, *(target for group in self.groups for target in group.targets)]:
            if pattern.startswith("re:"):
                _compile(config, pattern)

    def _group(self, name: str) -> _Group | None:
        """By name or regular expression first, then by class."""
        for group in self.groups:
            if any(_matches(name, target) for target in group.targets if target not in _CLASSES):
                return group
        for group in self.groups:
            if any(target in _CLASSES and name.endswith(_CLASSES[target]) for target in group.targets):
                return group
        return None

    def covers(self, name: str) -> bool:
        return not any(_matches(name, ignored) for ignored in self.ignored) and self._group(name) is not None

    def weight(self, module: Module) -> QuantizedWeight:
        """Raises CheckpointError on a module of no group, and on pieces that its group does not imply."""
        group = self._group(module.name)
        first = next(piece for piece in module.pieces if piece != "bias")
        if group is None:
            raise module.fail(first, "is of a module that no config group targets", "targets that name it")
        if group.kind == "int":
            columns = {"tensor": -1, "channel": 0}.get(group.strategy, group.columns)
            bits = integers.PACKED_BITS if "weight_packed" in module else (8,)
            if group.bits not in bits:
                raise module.fail(first, f"has {group.bits} bits", f"{', '.join(map(str, bits))} bits")
            return integers.weight(module, integers.Arguments(group.bits, columns, group.symmetric))
        if group.bits == 8:
            return fp8.weight(module, group.block, group.columns)
        if group.columns == fp4.GROUP:
            return fp4.nvfp4(module, codes="weight_packed", global_scale="weight_global_scale", divides=True)
        return fp4.mxfp4(module)


def _group(config: Fields) -> _Group | None:
    """A config group, checked; None where it quantises activations only."""
    targets = config.names("targets")
    if config.get("weights") is None:
        return None
    config.text("format", FORMATS, "mixed-precision")
    weights = config.object("weights")
    kind = weights.text("type", ("int", "float"), "int")
    bits = weights.integer("num_bits", integers.PACKED_BITS if kind == "int" else (4, 8), 8)
    columns = weights.group_size(default=-1)
    inferred = "group" if columns > 0 else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = weights.text("strategy", ("tensor", "channel", "group", "tensor_group", "block"), inferred)
    if strategy in ("group", "tensor_group") and columns < 1:
        raise weights.fail("group_size", "at least 1")
    if kind == "float" and bits == 4 and columns not in (16, 32):
        raise weights.fail("group_size", "16 (NVFP4) or 32 (MXFP4)")
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise weights.fail("symmetric", "true for float weights")
    if strategy == "block" and kind == "int":
        raise weights.fail("strategy", "tensor, channel, group for integer weights")
    block = None
    if strategy == "block":
        sizes = weights.get("block_structure")
        if isinstance(sizes, str):  # "128x128" in older files
            # Longer ones are too large, and int() refuses thousands of digits in words of its own.
            sizes = [int(part[:9]) for part in sizes.split("x") if part.isascii() and part.isdigit()]
        block = weights.block("block_structure", sizes)
    grouped = columns if strategy in ("group", "tensor_group") else 0
    return _Group(targets, bits, kind, strategy, grouped, block, symmetric)


def _compile(config: Fields, pattern: str) -> None:
    try:
        re.compile(pattern.removeprefix("re:"))
    except re.error:
        raise config.fail(
            "ignore" if pattern in config.names("ignore") else "config_groups", "regular expressions after re:"
        ) from None


def _matches(name: str, target: str) -> bool:
    return re.match(target.removeprefix("re:"), name) is not None if target.startswith("re:") else name == target
