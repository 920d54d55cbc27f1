"""Qwen2/2.5 (biases of q, k and v), Qwen3 (norms of q and k) and Qwen3-MoE (experts in some layers or all)."""

from __future__ import annotations

import functools

from atlas.models import decoder
from atlas.models.family import Family, read_config
from atlas.models.names import STANDARD
from atlas.targets.layers import FULL, SLIDING

configure = functools.partial(read_config, kinds=(FULL, SLIDING))

configure_moe = functools.partial(configure, applies=("num_experts",))

QWEN = Family(("Qwen2ForCausalLM", "Qwen3ForCausalLM"), configure, decoder.record, STANDARD.weights)

QWEN_MOE = Family(("Qwen3MoeForCausalLM",), configure_moe, decoder.record, STANDARD.weights)
