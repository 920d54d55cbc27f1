"""Holds a checkpoint's headers against what config.json implies, before memory is taken."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np

from atlas.errors import CheckpointError
from atlas.models.family import Family, ModelConfig, WeightSource
from atlas.runtime.program import StepPrograms
from atlas.runtime.weight_runs import rows_at_once
from atlas.weights import Checkpoint
from atlas.weights.checkpoint import TensorInfo

_log = logging.getLogger(__name__)

_IGNORABLE = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Tensors that old checkpoints carry and that config.json already determines."""


def check(
    checkpoint: Checkpoint,
    programs: StepPrograms,
    sources: Mapping[str, WeightSource],
    other_parts: tuple[str, ...] = (),
) -> None:
    """Hold every weight buffer against the checkpoint's headers, before memory is taken.

    Args:
        other_parts: prefixes of tensors that belong to parts of the model that are not served.

    Raises:
        CheckpointError: a tensor is missing, has another shape than config.json implies, or is a bias
            that nothing would apply (one that is all zeros is nothing to apply), or a norm.
    """
    used = set()
    for name, source in sources.items():
        if source.values:
            continue
        rows, *rest = programs.buffers[name].extents({})
        for tensor, tensor_rows in zip(source.tensors, source.rows or (rows,), strict=True):
            if tensor not in checkpoint.tensors:
                raise CheckpointError(
                    str(checkpoint.path), f"tensor {tensor} is missing", "every tensor that config.json implies"
                )
            used.add(tensor)
            info, expected = checkpoint.tensors[tensor], [tensor_rows, *rest]
            if list(info.shape) != expected:
                raise CheckpointError(
                    info.file, f"tensor {tensor} has shape {list(info.shape)}", f"{expected}, as config.json says"
                )
    for tensor in sorted(set(checkpoint.tensors) - used):
        if tensor.endswith((*_IGNORABLE, "lm_head.weight")) or tensor.startswith(other_parts):
            continue
        kind = "bias" if tensor.endswith(".bias") else "norm" if tensor.endswith("norm.weight") else ""
        if kind == "bias" and not checkpoint.read(tensor).any():
            continue  # as GPTQ tools write for every module
        if kind:
            raise CheckpointError(
                checkpoint.tensors[tensor].file,
                f"tensor {tensor} is a {kind} that would not be applied",
                "tensors that config.json announces",
                "check config.json (attention_bias, mlp_bias, architectures)",
            )
        _log.warning("%s: tensor %s is not used by this model", checkpoint.tensors[tensor].file, tensor)


def untied(checkpoint: Checkpoint, config: ModelConfig, family: Family) -> ModelConfig:
    """`config`, with the head untied where the checkpoint has one that differs from the token table.

    Such a head was trained on its own, and config.json was not told: transformers does not tie it either.
    """
    if not config.tied:
        return config
    sources = family.weights(dataclasses.replace(config, tied=False), checkpoint.tensors)
    table, head = (checkpoint.tensors.get(sources[name].tensors[0]) for name in ("embedding.weight", "lm_head.weight"))
    if table is None or head is None or _same(checkpoint, table, head):
        return config
    _log.warning(
        "%s: tensor %s differs from %s although tie_word_embeddings is true: not tied",
        head.file,
        head.name,
        table.name,
    )
    return dataclasses.replace(config, tied=False)


def _same(checkpoint: Checkpoint, one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two matrices hold the same values."""
    if one.shape != other.shape or len(one.shape) != 2 or not one.shape[1]:
        return one.shape == other.shape
    run = rows_at_once(one.shape, 1)
    parts = (slice(begin, min(begin + run, one.shape[0])) for begin in range(0, one.shape[0], run))
    return all(np.array_equal(checkpoint.read(one.name, part), checkpoint.read(other.name, part)) for part in parts)
