"""How large everything is that grows with the load: sequences, rows, logits and KV blocks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from atlas.errors import AtlasError, ConfigError, DeviceError
from atlas.models import ModelConfig
from atlas.runtime import core, host
from atlas.runtime.kernel_set import Choice
from atlas.runtime.options import RunnerOptions
from atlas.runtime.program import Buffer, StepPrograms
from atlas.runtime.step import Limits
from atlas.targets.shape import KV_BLOCK_SIZE
from atlas.weights.layouts import LAYOUTS

_log = logging.getLogger(__name__)

_KV_SHARE_OF_HOST = 0.25
"""Of the host memory available at load, what the KV cache may take when nothing is said: the machine has other work."""

_DEFAULT_SIZES = {False: (32, 512), True: (256, 8192)}
"""Sequences and rows of a step when nothing is said, by whether a GPU runs it. 8,192 rows of a prompt keep its matrix
units busy for some milliseconds; one more step then costs little."""

_SHARE_OF_DEVICE = 0.8
"""Of a GPU's memory, what weights and KV cache may take together when nothing is said."""


def nbytes(buffer: Buffer, layout: str, symbols: Mapping[str, int]) -> int:
    return LAYOUTS[layout].nbytes(buffer.extents(symbols), buffer.dtype)


def kv_block_bytes(programs: StepPrograms, layouts: Mapping[str, str]) -> int:
    """Bytes of one KV block over all layers, K and V."""
    caches = [buffer for buffer in programs.buffers.values() if buffer.shape[0] == "n_blocks"]
    return sum(nbytes(buffer, layouts[buffer.name], {"n_blocks": 1}) for buffer in caches)


def kv_budget(choice: Choice, programs: StepPrograms, block_bytes: int) -> int:
    """Bytes the KV cache may take when nothing is said. Raises DeviceError: weights leave no room for it."""
    if choice.backend != "cuda":
        return int(host.available_memory() * _KV_SHARE_OF_HOST)
    device = next(d for d in core.extension().cuda_devices() if d["index"] == choice.device)
    weights, share = programs.weight_bytes(), int(device["total_memory"] * _SHARE_OF_DEVICE)
    if share - weights < block_bytes:
        raise DeviceError(
            str(device["name"]),
            f"weights of {weights / 2**30:.2f} GiB in {choice.quant}",
            f"{(share - block_bytes) / 2**30:.2f} GiB and a KV cache: {_SHARE_OF_DEVICE:.0%} of the memory is for both",
            "take a quant of fewer bytes (--quant) or a smaller model, or say how large the KV cache is (--kv-memory)",
        )
    return share - weights


def limits_of(
    config: ModelConfig,
    options: RunnerOptions,
    block_bytes: int,
    budget: int,
    on_gpu: bool,
    most_logits: int,
) -> Limits:
    """Sizes of everything that grows with the load. budget: bytes of KV memory. most_logits: what kernels allow."""
    default = _DEFAULT_SIZES[on_gpu]
    max_rows = default[1] if options.max_rows is None else options.max_rows
    max_seqs = min(default[0], max_rows) if options.max_seqs is None else options.max_seqs
    for name, value in (("max_seqs", max_seqs), ("max_rows", max_rows)):
        if value < 1:
            raise ConfigError(name, f"{value}", "an integer of at least 1")
    if max_rows < max_seqs:
        raise ConfigError("max_rows", f"{max_rows} is below max_seqs {max_seqs}", "max_rows >= max_seqs")
    max_logits = options.max_logits or max_seqs
    if options.max_seqs is None:
        max_logits = max(max_logits, max_seqs)
    wanted = options.max_context or config.max_context
    if not 1 <= wanted <= config.max_context:
        raise ConfigError("max_context", f"{wanted}", f"1..{config.max_context}, the model's own limit")
    max_blocks = math.ceil(wanted / KV_BLOCK_SIZE)
    n_blocks = min(budget // block_bytes, max_seqs * max_blocks)
    if n_blocks < 1:
        raise ConfigError("kv_memory", f"{budget} bytes hold no KV block", f"at least {block_bytes} bytes")
    if n_blocks < max_blocks:
        if options.max_context is not None:
            raise AtlasError(
                "kv_memory",
                f"{budget} bytes hold {n_blocks * KV_BLOCK_SIZE} tokens",
                f"at least {max_blocks * block_bytes} bytes for max_context {wanted}",
                "lower --max-context or raise --kv-memory",
            )
        _log.warning(
            "max_context is %d instead of the model's %d: the KV memory of %d bytes holds no more",
            n_blocks * KV_BLOCK_SIZE,
            wanted,
            budget,
        )
        max_blocks = n_blocks
    return Limits(
        n_rows=max_rows,
        n_seqs=max_seqs,
        n_logits=min(max_logits, most_logits),
        max_blocks=max_blocks,
        n_blocks=n_blocks,
        n_slots=max_seqs,
    )
