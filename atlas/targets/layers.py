"""What differs from layer to layer of a decoder: how far its attention sees, and whether it has experts.

config.json states it in several ways (`layer_types`, a pattern, a first layer, lists of exceptions), and leaves
the rest to the model's code: that part follows from the architecture's name, here. transformers 5.24 is the
reference. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError
from atlas.targets.fields import architecture, config_field

FULL, SLIDING = "full_attention", "sliding_attention"

MAX_LAYERS = 1024

_EVERY_LAYER = ("MistralForCausalLM", "Phi3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures in which a window, where there is one, is every layer's."""

_UPPER_LAYERS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures in which layers from `max_window_layers` on have the window."""

_PATTERN = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
"""Architectures in which every `sliding_window_pattern`-th layer sees everything, the others the window."""

_SWITCHED = (*_UPPER_LAYERS, "Qwen3MoeForCausalLM")
"""Architectures whose window is off unless `use_sliding_window` is true."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer.

    kind: its attention's name in `layer_types`.
    window: tokens that attention sees, its own included; 0 means all.
    sparse: the MLP is a router and experts.
    """

    kind: str
    window: int = 0
    sparse: bool = False


def layers(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Every layer of a flat config (fields.text_config).

    Raises:
        CheckpointError: a field is absurd, or fields contradict each other.
    """
    count = config_field(config, "num_hidden_layers", int)
    if count > MAX_LAYERS:
        raise CheckpointError("config.json", f"num_hidden_layers is {count}", f"at most {MAX_LAYERS}")
    window = _window(config)
    step, dense = config_field(config, "decoder_sparse_step", int, 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise CheckpointError("config.json", f"mlp_only_layers is {dense!r}", "a list of layer numbers")
    experts = has_experts(config)
    return tuple(
        Layer(kind, window if kind == SLIDING else 0, experts and i not in dense and (i + 1) % step == 0)
        for i, kind in enumerate(_kinds(config, count, window))
    )


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether any layer may have experts. Dense models of a MoE family state 0 or null."""
    return config.get("num_experts") not in (None, 0)


def _window(config: Mapping[str, Any]) -> int:
    """The sliding window, 0 where there is none or it is switched off."""
    family, used = architecture(config), config.get("use_sliding_window")
    if config.get("sliding_window") is None:
        return 0
    if not (used is None or isinstance(used, bool)):
        raise CheckpointError("config.json", f"use_sliding_window is {used!r}", "true or false")
    if used is False or (used is None and family in _SWITCHED):
        if family in (*_EVERY_LAYER, *_PATTERN) and family not in _SWITCHED:
            raise CheckpointError(
                "config.json",
                f"use_sliding_window is false, sliding_window is {config['sliding_window']!r}",
                f"sliding_window null for {family} without a window: that architecture has no such switch",
            )
        return 0
    window: int = config_field(config, "sliding_window", int)
    return window


def _kinds(config: Mapping[str, Any], count: int, window: int) -> list[str]:
    stated, family = config.get("layer_types"), architecture(config)
    if stated is not None:
        if not isinstance(stated, list) or len(stated) != count or not all(isinstance(kind, str) for kind in stated):
            found = f"{len(stated)} entries" if isinstance(stated, list) else repr(stated)
            raise CheckpointError("config.json", f"layer_types has {found}", f"{count} names, one per hidden layer")
        if SLIDING in stated and not window:
            raise CheckpointError(
                "config.json", f"layer_types has {SLIDING} but no sliding_window is in use", "a sliding_window"
            )
        if family not in _EVERY_LAYER:
            return stated
    kinds = [FULL] * count
    if window and family in _EVERY_LAYER:
        kinds = [SLIDING] * count
    elif window and family in _UPPER_LAYERS:
        first = config.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise CheckpointError("config.json", f"max_window_layers is {first!r}", "an integer of at least 0")
        kinds = [SLIDING if i >= first else FULL for i in range(count)]
    elif window and family in _PATTERN:
        period = config_field(config, "sliding_window_pattern", int)
        kinds = [SLIDING if (i + 1) % period else FULL for i in range(count)]
    if stated is not None and stated != kinds:
        raise CheckpointError(
            "config.json",
            f"layer_types differs from what {family} does with sliding_window {window or None}",
            f"{kinds[0]} in every layer",
        )
    return kinds
