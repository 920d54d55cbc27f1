"""Gemma-3, text only: norms of (1 + w) before and after each block, windows in most layers, two RoPE bases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from atlas.models import decoder
from atlas.models.family import Family, ModelConfig, read_config
from atlas.models.names import Names
from atlas.targets.layers import FULL, SLIDING
from atlas.targets.shape import Shard

NAMES = Names(
    # Text-only files; multimodal ones as published; as transformers 5 names its modules; saved without a head.
    prefixes=("model.", "language_model.model.", "model.language_model.", ""),
    heads=("lm_head", "language_model.lm_head"),
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)

_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def configure(config: Mapping[str, Any], shard: Shard) -> ModelConfig:
    """A Gemma-3 config.json, text-only or multimodal. A stored norm weight w means 1 + w."""
    found = read_config(config, shard, applies=("query_pre_attn_scalar",), kinds=(FULL, SLIDING))
    return dataclasses.replace(found, norm_offset=1.0)


GEMMA3 = Family(
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), configure, decoder.record, NAMES.weights, _VISION
)
