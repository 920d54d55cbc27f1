"""RoPE frequencies from config.json (transformers' `modeling_rope_utils` is the reference)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError
from atlas.targets.shape import config_field


def inv_freq(config: Mapping[str, Any], head_dim: int) -> list[float]:
    """Frequencies [head_dim / 2] for the config's rope scheme: none ("default"), "linear" or "llama3".

    The scheme stands in `rope_scaling` (type under `rope_type`, or `type` in older files) or, with
    the base, in `rope_parameters` (newer files).

    Raises:
        CheckpointError: an unknown scheme, or one of its fields missing.
    """
    if head_dim % 2:
        raise CheckpointError("config.json", f"head_dim is {head_dim}", "an even number")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError("config.json", f"rope_scaling is {scaling!r}", "an object or null")
    base = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    if isinstance(base, bool) or not isinstance(base, int | float) or not 1.0 < base < 1e12:
        raise CheckpointError("config.json", f"rope_theta is {base!r}", "a number above 1")
    frequencies = [float(base) ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    scheme = scaling.get("rope_type", scaling.get("type", "default"))
    if scheme == "default":
        return frequencies
    if scheme == "linear":
        factor = config_field(scaling, "factor", float)
        return [f / factor for f in frequencies]
    if scheme == "llama3":
        return [_llama3(f, scaling) for f in frequencies]
    raise CheckpointError("config.json", f"rope_scaling type {scheme!r} is not known", "default, linear, llama3")


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Llama 3.1's bands: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    factor: float = config_field(scaling, "factor", float)
    low: float = config_field(scaling, "low_freq_factor", float)
    high: float = config_field(scaling, "high_freq_factor", float)
    original: int = config_field(scaling, "original_max_position_embeddings", int)
    wavelength = 2.0 * math.pi / frequency
    if wavelength > original / low:
        return frequency / factor
    if wavelength < original / high:
        return frequency
    ramp = (original / wavelength - low) / (high - low)
    return (1.0 - ramp) * frequency / factor + ramp * frequency
