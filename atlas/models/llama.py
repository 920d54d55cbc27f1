"""Llama: Llama 2/3/3.x and SmolLM2. The plain decoder; biases where config.json announces them."""

from __future__ import annotations

from atlas.models import decoder
from atlas.models.family import Family, read_config
from atlas.models.names import STANDARD

LLAMA = Family(("LlamaForCausalLM",), read_config, decoder.record, STANDARD.weights)
