"""Model families: each a short file over the generic decoder. Standard library only, so that the
build can record the same programs as the loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError
from atlas.models.family import Family, ModelConfig
from atlas.models.gemma3 import GEMMA3
from atlas.models.granite import GRANITE
from atlas.models.llama import LLAMA
from atlas.models.mistral import MISTRAL
from atlas.models.phi3 import PHI3
from atlas.models.qwen import QWEN, QWEN_MOE
from atlas.targets.fields import text_config

_ALL = (LLAMA, MISTRAL, QWEN, GEMMA3, PHI3, GRANITE, QWEN_MOE)

FAMILIES: dict[str, Family] = {architecture: family for family in _ALL for architecture in family.architectures}

__all__ = ["FAMILIES", "Family", "ModelConfig", "family_of"]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises CheckpointError naming the architecture and the known ones."""
    names = text_config(config).get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(
            "config.json",
            f"architectures is {names!r}",
            f"a list that begins with one of {', '.join(sorted(FAMILIES))}",
        )
    if names[0] not in FAMILIES:
        raise CheckpointError("config.json", f"architecture {names[0]!r} is not supported", ", ".join(sorted(FAMILIES)))
    return FAMILIES[names[0]]
