"""Phi-3, Phi-3.5 and Phi-4: fused projections, LongRoPE, and heads that RoPE may turn in part."""

from __future__ import annotations

import functools

from atlas.models import decoder
from atlas.models.family import Family, read_config
from atlas.models.names import Names
from atlas.targets.layers import FULL, SLIDING

NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

configure = functools.partial(read_config, kinds=(FULL, SLIDING))

PHI3 = Family(("Phi3ForCausalLM",), configure, decoder.record, NAMES.weights)
