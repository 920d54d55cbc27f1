"""Which format each weight buffer gets: decided per tensor, from the recipe's role and what the checkpoint stores."""

from __future__ import annotations

import collections
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping

from atlas.models.family import FormatOf, WeightSource
from atlas.targets import formats
from atlas.targets.formats import FORMATS, INTEGER_FORMATS, ROLE_FORMATS, plain_format
from atlas.targets.quant import DTYPE_BYTES
from atlas.weights import Checkpoint

_log = logging.getLogger(__name__)

_TABLES = ("embed_tokens.weight", "lm_head.weight")


def of_kernels(names: Iterable[str]) -> frozenset[str]:
    """The block formats of weights that kernels called so (`KernelKey.name`) are for."""
    words = (re.search(r"_weight_([a-z0-9]+)_", name) for name in names)
    return frozenset(word.group(1) for word in words if word and word.group(1) in FORMATS)


def chooser(
    checkpoint: Checkpoint, sources: Mapping[str, WeightSource], available: Collection[str] = FORMATS
) -> FormatOf:
    """The choice for one checkpoint. available: formats that there are kernels for at hand; a tensor that has an exact
    format but none of these gets that, so that what is missing can be named.

    What is quantised already is imported exactly or dequantised, never quantised again; where a file mixes
    precisions, tensors that it keeps in floats stay floats. So only checkpoints without any quantised tensor
    are quantised at load. A buffer of several tensors gets the smallest format that holds all of them.
    """
    mixed = any(info.scheme is not None for info in checkpoint.tensors.values())
    dequantised: collections.Counter[str] = collections.Counter()

    def format_of(name: str, role: str) -> str:
        if role in DTYPE_BYTES:
            return role
        infos = [checkpoint.tensors[t] for t in sources[name].tensors if t in checkpoint.tensors]
        stored = [info.scheme.block_format() if info.scheme else None for info in infos]
        if all(stored):
            known, accepted = [s for s in stored if s], ROLE_FORMATS[role]
            at_hand = formats.common(known, [format for format in accepted if format in available])
            if exact := at_hand or formats.common(known, accepted):
                return exact
        if mixed or role == "stored":
            for info in infos:
                if info.scheme is not None:
                    dequantised[info.dtype] += math.prod(info.shape)
                    _log.info("%s (%s) has no exact format here: kept as bf16", info.name, info.dtype)
            return "bf16"
        return plain_format(role)

    return format_of


def natural_quants(checkpoint: Checkpoint) -> dict[str, str]:
    """Kind of hardware, "cpu" and "cuda", -> the recipe that keeps most of a checkpoint as it is: bf16 where none does.

    Token table and head do not count: they keep their own format in each of these, and may outweigh a small
    model's layers (of Gemma 3 270M they are 63 %).
    """
    return {kind: _natural(checkpoint, kind) for kind in _QUANTISED}


def _natural(checkpoint: Checkpoint, kind: str) -> str:
    elements: collections.Counter[str] = collections.Counter()
    for info in checkpoint.tensors.values():
        if len(info.shape) < 2 or info.name.endswith(_TABLES):
            continue
        stored = info.scheme.block_format() if info.scheme else None
        elements[_recipe_of(stored, kind) if stored else "bf16"] += math.prod(info.shape)
    if not elements or elements["bf16"] * 2 > elements.total():
        return "bf16"
    return max(_QUANTISED[kind], key=lambda name: elements[name])


_QUANTISED = {"cpu": ("int4", "int8"), "cuda": ("fp8", "nvfp4", "int4")}
"""Recipes that keep quantised weights, by kind of hardware."""


def _recipe_of(stored: str, kind: str) -> str:
    """The recipe that has products of a stored format."""
    if kind == "cpu":
        exact = formats.common([stored], INTEGER_FORMATS)
        return f"int{FORMATS[exact].bits}" if exact else "bf16"
    holding = (name for name in _QUANTISED[kind] if formats.common([stored], ROLE_FORMATS[name]))
    return next(holding, "bf16")
