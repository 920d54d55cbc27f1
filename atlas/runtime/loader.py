"""Puts a checkpoint's tensors into the arena: checked first, then cast, joined and packed one buffer at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from atlas.build.manifest import KernelEntry
from atlas.errors import BuildError, CheckpointError
from atlas.models.family import WeightSource
from atlas.runtime.backend import Array, Backend, BoundProgram
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.program import Buffer, StepPrograms
from atlas.weights import Checkpoint
from atlas.weights.layouts import LAYOUTS

_log = logging.getLogger(__name__)

_IGNORABLE = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Tensors that old checkpoints carry and that config.json already determines."""


def check(checkpoint: Checkpoint, programs: StepPrograms, sources: Mapping[str, WeightSource]) -> None:
    """Hold every weight buffer against the checkpoint's headers, before memory is taken.

    Raises:
        CheckpointError: a tensor is missing, has another shape than config.json implies, or is a bias
            that nothing would apply.
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
        if tensor.endswith(_IGNORABLE) or tensor == "lm_head.weight":
            continue
        if tensor.endswith(".bias"):
            raise CheckpointError(
                checkpoint.tensors[tensor].file, f"tensor {tensor} is a bias that this model family would not apply"
            )
        _log.warning("%s: tensor %s is not used by this model", checkpoint.tensors[tensor].file, tensor)


def buffer_layouts(programs: StepPrograms, kernels: Mapping[str, KernelEntry]) -> dict[str, str]:
    """Storage layout of each weight buffer: what the kernels that read it declare, which must agree."""
    layouts: dict[str, str] = {}
    for launch in programs.launches():
        entry = kernels.get(launch.key.name()) or kernels.get(launch.key.signature())
        for operand, name in launch.operands:
            if programs.buffers[name].kind != "weight":
                continue
            layout = entry.layouts.get(operand, "row_major") if entry else "row_major"
            if layouts.setdefault(name, layout) != layout:
                raise BuildError(
                    f"weight {name}", f"launch {launch.name} wants layout {layout}, another {layouts[name]}"
                )
    return layouts


def load(
    checkpoint: Checkpoint,
    backend: Backend,
    bound: BoundProgram,
    sources: Mapping[str, WeightSource],
    layouts: Mapping[str, str],
) -> int:
    """Stream every weight buffer into the arena. Returns the bytes written."""
    written = 0
    for name, source in sources.items():
        buffer = bound.buffers[name]
        packed = LAYOUTS[layouts[name]].pack(_assemble(checkpoint, buffer, source))
        backend.write(bound.plan.offsets[name], packed)
        written += packed.nbytes
    return written


def _assemble(checkpoint: Checkpoint, buffer: Buffer, source: WeightSource) -> Array:
    """One buffer in logical layout and its own dtype."""
    dtype = NUMPY[buffer.dtype]
    if source.values:
        return np.asarray(source.values, np.float64).astype(dtype)
    result = np.empty(buffer.extents({}), dtype)
    row = 0
    for tensor in source.tensors:
        part = checkpoint.read(tensor)
        result[row : row + len(part)] = part  # rounds to nearest even where it narrows
        row += len(part)
    return result
