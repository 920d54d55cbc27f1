"""What a request gets for sampling fields that it leaves out, and where each value comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from atlas.config import Origin
from atlas.engine import sampling

RANGES: Mapping[str, tuple[float, float]] = {**sampling.RANGES, "top_k": (0, 2**31)}
"""The fields that have a default of the model, and what is accepted. `top_k` is a whole number."""

GENERATION_CONFIG = "model default (generation_config.json)"


class Layer(msgspec.Struct, frozen=True):
    """Values that someone chose, and who that is.

    origin: what is told of each value.  file: what is named where a value is out of range.
    """

    values: Mapping[str, Any]
    origin: str
    file: str


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request gets for a field that it leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    origins: tuple[Origin, ...] = ()

    @classmethod
    def of_model(cls, generation_config: Mapping[str, Any], layers: Iterable[Layer] = ()) -> SamplingDefaults:
        """The OpenAI API's values (everything as the model has it), where nobody in a higher layer has one: the
        model's generation_config.json, then `layers`, each above the one before it. A value out of range is passed
        over, which its field's origin tells."""
        values: dict[str, Any] = {}
        origins = []
        for name in RANGES:
            default = getattr(cls(), name)
            chosen, origin, faults = default, "built-in (OpenAI's)", ""
            for layer in (Layer(generation_config, GENERATION_CONFIG, "generation_config.json"), *layers):
                value = layer.values.get(name)
                if accepts(name, value):
                    chosen, origin, faults = type(default)(value), layer.origin, ""
                elif value is not None:
                    faults += f"; {layer.file} has {value!r}, which is out of range"
            values[name] = chosen
            origins.append(Origin(name, chosen, origin + faults))
        return cls(**values, origins=tuple(origins))


def accepts(name: str, value: Any) -> bool:
    """Whether `value` can be the default of a field of `RANGES`."""
    least, most = RANGES[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and least <= value <= most and (name != "top_k" or value == int(value))


def parse_defaults(raw: str | Mapping[str, Any]) -> dict[str, float]:
    """Values that a setting gives, as JSON text or as a mapping. Raises ValueError naming the field."""
    given = raw
    if isinstance(raw, str):
        try:
            given = msgspec.json.decode(raw)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{raw[:80]!r}: {error}") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{str(raw)[:80]!r}")
    for name, value in given.items():
        if name not in RANGES:
            raise ValueError(f"unknown field {name!r}; known: {', '.join(RANGES)}")
        if not accepts(name, value):
            kind = "a whole number" if name == "top_k" else "a number"
            raise ValueError(f"{name} is {value!r}, not {kind} from {RANGES[name][0]:g} to {RANGES[name][1]:g}")
    return dict(given)
