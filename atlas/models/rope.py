"""RoPE frequencies from config.json (transformers' `modeling_rope_utils` is the reference)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError
from atlas.targets.shape import config_field

_KNOWN = "default, linear, llama3"


def inv_freq(config: Mapping[str, Any], head_dim: int) -> list[float]:
    """Frequencies [head_dim / 2] for the config's rope scheme: none ("default"), "linear" or "llama3".

    The scheme stands in `rope_scaling` (type under `rope_type`, or `type` in older files) or, with
    the base, in `rope_parameters` (newer files).

    Raises:
        CheckpointError: an unknown scheme, or one of its fields missing or out of range.
    """
    if head_dim % 2:
        raise CheckpointError("config.json", f"head_dim is {head_dim}", "an even number")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError("config.json", f"rope_scaling is {scaling!r}", "an object or null")
    base: float = config_field(scaling, "rope_theta", float, config_field(config, "rope_theta", float, 10000.0))
    frequencies = [base ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    scheme = scaling.get("rope_type", scaling.get("type"))
    if scheme is None:
        if set(scaling) - {"rope_theta"}:
            raise CheckpointError("config.json", f"rope_scaling {dict(scaling)} names no rope_type", _KNOWN)
        scheme = "default"
    if scheme == "default":
        return frequencies
    if scheme == "linear":
        factor = config_field(scaling, "factor", float)
        return [f / factor for f in frequencies]
    if scheme == "llama3":
        return [_llama3(f, scaling) for f in frequencies]
    raise CheckpointError("config.json", f"rope_scaling type {scheme!r} is not known", _KNOWN)


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Llama 3.1's bands: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    factor: float = config_field(scaling, "factor", float)
    low: float = config_field(scaling, "low_freq_factor", float)
    high: float = config_field(scaling, "high_freq_factor", float)
    original: int = config_field(scaling, "original_max_position_embeddings", int)
    if low >= high:
        raise CheckpointError("config.json", f"low_freq_factor {low} and high_freq_factor {high}", "low below high")
    wavelength = 2.0 * math.pi / frequency
    if wavelength > original / low:
        return frequency / factor
    if wavelength < original / high:
        return frequency
    ramp = (original / wavelength - low) / (high - low)
    return (1.0 - ramp) * frequency / factor + ramp * frequency
