"""What a request gets for sampling fields that it leaves out, and where each value comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from atlas.config import Origin
from atlas.engine.sampling import MAX_TEMPERATURE, REPETITION_RANGE


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request gets for a field that it leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    origins: tuple[Origin, ...] = ()

    @classmethod
    def of_model(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """The model's own values where it has them, elsewhere the OpenAI API's: everything as the model has it."""
        values: dict[str, Any] = {}
        origins = []
        for name, builtin, least, limit in (
            ("temperature", 1.0, 0.0, MAX_TEMPERATURE),
            ("top_p", 1.0, 0.0, 1.0),
            ("top_k", 0, 0, 2**31),
            ("min_p", 0.0, 0.0, 1.0),
            ("repetition_penalty", 1.0, *REPETITION_RANGE),
        ):
            value, origin = generation_config.get(name), "built-in (OpenAI's)"
            values[name] = builtin
            if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= limit:
                values[name], origin = type(builtin)(value), "model default (generation_config.json)"
            elif value is not None:
                origin += f"; generation_config.json has {value!r}, which is out of range"
            origins.append(Origin(name, values[name], origin))
        return cls(**values, origins=tuple(origins))
