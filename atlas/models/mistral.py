"""Mistral: Llama whose attention may see only a window of tokens, in every layer alike."""

from __future__ import annotations

import functools

from atlas.models import decoder
from atlas.models.family import Family, read_config
from atlas.models.names import STANDARD
from atlas.targets.layers import FULL, SLIDING

configure = functools.partial(read_config, kinds=(FULL, SLIDING))

MISTRAL = Family(("MistralForCausalLM",), configure, decoder.record, STANDARD.weights)
