"""Granite 3: Llama with multipliers of embeddings, scores, residual additions and logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from atlas.models import decoder
from atlas.models.family import Family, ModelConfig, read_config
from atlas.models.names import STANDARD
from atlas.targets.fields import config_field
from atlas.targets.shape import Shard

_APPLIED = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def configure(config: Mapping[str, Any], shard: Shard) -> ModelConfig:
    """A Granite config.json. `logits_scaling` divides the logits."""
    found = read_config(config, shard, applies=_APPLIED)
    return dataclasses.replace(found, logits_scale=1.0 / config_field(config, "logits_scaling", float, 1.0))


GRANITE = Family(("GraniteForCausalLM",), configure, decoder.record, STANDARD.weights)
