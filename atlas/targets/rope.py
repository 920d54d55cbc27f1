"""RoPE from config.json: frequencies and scale of every scheme, by kind of attention layer.

transformers' `modeling_rope_utils` (5.24) is the reference of facts. The scheme stands in `rope_scaling` (older
files, type under `rope_type` or `type`) or, with the base, in `rope_parameters` (newer ones), where it may be
given for each kind of layer. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError
from atlas.targets.fields import config_field
from atlas.targets.layers import FULL, SLIDING

_ANY = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("finetuned", "mrope_section", "mrope_interleaved"),
}
"""Fields that every scheme may have. Sections give the axes of images; a text has the same position on all."""

_FIELDS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
    "proportional": {"factor"},
    "factors": {"factors"},  # GGUF's: each frequency's divisor
}
"""Schemes, and the fields of each."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys.

    inv_freq: frequencies [rotary_dim / 2] of each set, fp32 values.
    scale: of cos and sin.
    original_length: longest sequence that uses set 0 where there are two; 0 where there is one.
    """

    inv_freq: tuple[tuple[float, ...], ...]
    scale: float = 1.0
    original_length: int = 0


def parameters(config: Mapping[str, Any], kind: str = FULL) -> Mapping[str, Any]:
    """The scheme's fields for one kind of layer, base included.

    A model with `rope_local_base_freq` (Gemma-3) has a base of its own in sliding layers, which
    `rope_scaling` does not reach.
    """
    scaling, stated = config.get("rope_scaling"), config.get("rope_parameters")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", stated)):
        if not (value is None or isinstance(value, Mapping)):
            raise CheckpointError("config.json", f"{name} is {value!r}", "an object or null")
    has_local = config.get("rope_local_base_freq") is not None
    local = has_local and kind == SLIDING
    nested = isinstance(stated, Mapping) and any(isinstance(stated.get(name), Mapping) for name in (FULL, SLIDING))
    if stated is not None and nested and (has_local or not scaling):
        found = stated.get(kind)
        if found is None and not local:
            raise CheckpointError("config.json", f"rope_parameters has no {kind}", "parameters for every kind of layer")
        if not (found is None or isinstance(found, Mapping)):
            raise CheckpointError("config.json", f"rope_parameters {kind} is {found!r}", "an object or null")
        scheme = {**(found or {}), **((scaling or {}) if not local else {})}
    else:
        scheme = {} if local else dict(scaling or stated or {})
    base = "rope_local_base_freq" if local else "rope_theta"
    theta = config_field(scheme, "rope_theta", float, config_field(config, base, float, 10000.0))
    return {**scheme, "rope_theta": theta}


def scheme_of(parameters: Mapping[str, Any]) -> str:
    """The scheme's name, checked with the names of its fields. Raises CheckpointError naming what is not known."""
    scheme = parameters.get("rope_type")
    if scheme is None:
        scheme = parameters.get("type")
    if scheme is None:
        stated = {name: value for name, value in parameters.items() if name != "rope_theta"}
        if set(stated) - {"partial_rotary_factor"}:
            raise CheckpointError("config.json", f"rope_scaling {stated} names no rope_type", _known())
        scheme = "default"
    if scheme in ("su", "yarn") and "long_factor" in parameters:  # Phi-3's first names of it
        scheme = "longrope"
    if not isinstance(scheme, str) or scheme not in _FIELDS:
        raise CheckpointError("config.json", f"rope_scaling type {scheme!r} is not known", _known())
    for name, value in parameters.items():
        neutral = value is None or (name.endswith("factor") and value in (1, 1.0) and value is not True)
        if name not in _ANY | _FIELDS[scheme] and not neutral:
            raise CheckpointError(
                "config.json",
                f"rope_scaling of type {scheme} has {name} {value!r}, which this scheme does not use",
                ", ".join(sorted(_FIELDS[scheme] | {"rope_type", "rope_theta"})),
            )
    return scheme


def _known() -> str:
    return ", ".join(name for name in _FIELDS if name != "factors")


def rotary_dim(config: Mapping[str, Any], head_dim: int, kind: str = FULL) -> int:
    """Leading elements of a head that RoPE turns; head_dim for all of them."""
    found = parameters(config, kind)
    if found.get("rope_type", found.get("type")) == "proportional":
        return head_dim  # what it leaves alone has frequency 0
    source = found if found.get("partial_rotary_factor") is not None else config
    factor = config_field(source, "partial_rotary_factor", float, 1.0)
    turned: int = round(head_dim * factor)
    if not 0.0 < factor <= 1.0 or turned != head_dim * factor or (factor < 1.0 and turned % 2):
        raise CheckpointError(
            "config.json",
            f"partial_rotary_factor is {factor} of head_dim {head_dim}",
            "a fraction in (0, 1] that gives an even number of elements",
        )
    return turned


def rope(config: Mapping[str, Any], head_dim: int, kind: str = FULL) -> Rope:
    """RoPE of one kind of layer of a flat config (fields.text_config).

    Raises:
        CheckpointError: an unknown scheme, a field that it does not have, or one missing or out of range.
    """
    if head_dim % 2:
        raise CheckpointError("config.json", f"head_dim is {head_dim}", "an even number")
    found = parameters(config, kind)
    scheme, base, dim = scheme_of(found), found["rope_theta"], rotary_dim(config, head_dim, kind)
    frequencies = [base ** (-2.0 * i / dim) for i in range(dim // 2)]
    if scheme == "linear":
        factor = config_field(found, "factor", float)
        return _one([f / factor for f in frequencies])
    if scheme == "dynamic":
        # Up to max_position_embeddings, which no sequence may exceed here, this scheme changes nothing.
        config_field(found, "factor", float)
    if scheme == "llama3":
        return _one(_llama3(frequencies, found, _original_length(config, found)))
    if scheme == "yarn":
        return _yarn(frequencies, dim, config, found)
    if scheme == "longrope":
        return _longrope(frequencies, config, found)
    if scheme == "proportional":
        return _one(_proportional(base, head_dim, found))
    if scheme == "factors":
        return _one([f / d for f, d in zip(frequencies, _list(found, "factors", dim // 2), strict=True)])
    return _one(frequencies)


def _one(frequencies: list[float]) -> Rope:
    return Rope((tuple(frequencies),))


def _original_length(config: Mapping[str, Any], found: Mapping[str, Any]) -> int:
    """The length a model was first trained for. Phi-3 has it beside the scheme, where it comes first."""
    name, trained = "original_max_position_embeddings", config_field(config, "max_position_embeddings", int, 2048)
    length: int = config_field(config, name, int, config_field(found, name, int, trained))
    return length


def _list(found: Mapping[str, Any], name: str, length: int) -> list[float]:
    values = found.get(name)
    if values is None:
        raise CheckpointError("config.json", f"rope_scaling has no {name}", f"a list of {length} numbers")
    if not isinstance(values, list) or len(values) != length:
        what = f"{len(values)} entries" if isinstance(values, list) else repr(values)
        raise CheckpointError("config.json", f"rope_scaling {name} has {what}", f"{length}, half the rotary dimension")
    return [config_field({name: value}, name, float) for value in values]


def _llama3(frequencies: list[float], found: Mapping[str, Any], original: int) -> list[float]:
    """Llama 3.1's bands: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    factor: float = config_field(found, "factor", float)
    low: float = config_field(found, "low_freq_factor", float)
    high: float = config_field(found, "high_freq_factor", float)
    if low >= high:
        raise CheckpointError("config.json", f"low_freq_factor {low} and high_freq_factor {high}", "low below high")
    result = []
    for frequency in frequencies:
        turns = original * frequency / (2.0 * math.pi)
        ramp = min(max((turns - low) / (high - low), 0.0), 1.0)
        result.append((1.0 - ramp) * frequency / factor + ramp * frequency)
    return result


def _yarn(frequencies: list[float], dim: int, config: Mapping[str, Any], found: Mapping[str, Any]) -> Rope:
    """YaRN (Peng et al., arXiv 2309.00071): interpolated below, kept above, a ramp over the elements between."""
    original = _original_length(config, found)
    trained = config_field(config, "max_position_embeddings", int, 2048)
    factor: float = config_field(found, "factor", float, trained / original)
    fast, slow = config_field(found, "beta_fast", float, 32.0), config_field(found, "beta_slow", float, 1.0)
    base = found["rope_theta"]
    if base <= 1.0:
        raise CheckpointError("config.json", f"rope_theta is {base}", "above 1 for rope type yarn")

    def element(turns: float) -> float:
        """Which element of the head makes that many turns over the original length."""
        return dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))

    low, high = element(fast), element(slow)
    if config_field(found, "truncate", bool, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    result = []
    for i, frequency in enumerate(frequencies):
        interpolated = min(max((i - low) / width, 0.0), 1.0)
        result.append(frequency / factor * interpolated + frequency * (1.0 - interpolated))
    return Rope((tuple(result),), _yarn_scale(found, factor))


def _yarn_scale(found: Mapping[str, Any], factor: float) -> float:
    if found.get("attention_factor") is not None:
        stated: float = config_field(found, "attention_factor", float)
        return stated

    def magnitude(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if found.get("mscale") and found.get("mscale_all_dim"):  # 0 means absent
        parts = [magnitude(config_field(found, name, float)) for name in ("mscale", "mscale_all_dim")]
        return parts[0] / parts[1]
    return magnitude(1.0)


def _longrope(frequencies: list[float], config: Mapping[str, Any], found: Mapping[str, Any]) -> Rope:
    """LongRoPE (Ding et al., arXiv 2402.13753): a divisor per frequency, one list up to the original length and
    another, for every position alike, beyond."""
    original = _original_length(config, found)
    trained = config_field(config, "max_position_embeddings", int, 2048)
    factor: float = config_field(found, "factor", float, trained / original)
    short, long = (_list(found, name, len(frequencies)) for name in ("short_factor", "long_factor"))
    scale = 1.0
    if factor > 1.0:
        if original < 2:
            raise CheckpointError("config.json", f"original_max_position_embeddings is {original}", "at least 2")
        scale = math.sqrt(1.0 + math.log(factor) / math.log(original))
    scale = config_field(found, "attention_factor", float, scale)
    sets = [tuple(f / d for f, d in zip(frequencies, divisors, strict=True)) for divisors in (short, long)]
    if trained <= original:
        return Rope((sets[0],), scale)
    return Rope((sets[0], sets[1]), scale, original)


def _proportional(base: float, head_dim: int, found: Mapping[str, Any]) -> list[float]:
    """Frequencies of the whole head, of which only the first share turns; the others are 0."""
    share = config_field(found, "partial_rotary_factor", float, 1.0)
    if not 0.0 < share <= 1.0:
        raise CheckpointError("config.json", f"partial_rotary_factor is {share}", "a fraction in (0, 1]")
    turned, factor = int(share * head_dim // 2), config_field(found, "factor", float, 1.0)
    return [base ** (-2.0 * i / head_dim) / factor if i < turned else 0.0 for i in range(head_dim // 2)]
