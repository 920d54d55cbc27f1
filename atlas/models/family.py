"""What a family file provides, and the model configuration that all families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from atlas.errors import CheckpointError
from atlas.runtime.program import StepPrograms
from atlas.targets.quant import Recipe
from atlas.targets.shape import Shape, Shard, config_field, shape


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A config.json, checked: what loading and recording need beyond the shape.

    n_layers: decoder layers.            max_context: longest sequence the model was made for.
    tied: the head is the token table.   inv_freq: RoPE frequencies [head_dim / 2], fp32 values.
    """

    architecture: str
    shape: Shape
    n_layers: int
    max_context: int
    tied: bool
    inv_freq: tuple[float, ...]


def read_config(
    config: Mapping[str, Any],
    shard: Shard,
    *,
    tied_default: bool,
    rope: Callable[[Mapping[str, Any], int], list[float]],
) -> ModelConfig:
    """The parts of config.json that every decoder family reads alike."""
    tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = tied_default
    if not isinstance(tied, bool):
        raise CheckpointError("config.json", f"tie_word_embeddings is {tied!r}", "true or false")
    derived = shape(config, shard)
    n_layers = config_field(config, "num_hidden_layers", int)
    if n_layers > 1024:
        raise CheckpointError("config.json", f"num_hidden_layers is {n_layers}", "at most 1024")
    return ModelConfig(
        architecture=config["architectures"][0],
        shape=derived,
        n_layers=n_layers,
        max_context=config_field(config, "max_position_embeddings", int, 2048),
        tied=tied,
        inv_freq=tuple(rope(config, derived.head_dim)),
    )


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """Where a weight buffer's rows come from.

    tensors: checkpoint tensors, concatenated along the first axis.
    rows: of each tensor, where there are several; a single tensor has all rows of the buffer.
    values: computed values instead of tensors (RoPE frequencies).
    """

    tensors: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


FormatOf = Callable[[str, str], str]
"""Weight buffer and its role's format (atlas/targets/quant.py) -> its element type or block format."""


class Record(Protocol):
    """Records a model's programs. format_of: by default what load-time quantisation makes of plain floats."""

    def __call__(self, config: ModelConfig, recipe: Recipe, format_of: FormatOf = ...) -> StepPrograms: ...


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    architectures: names in config.json that it serves.
    configure: config.json and shard -> ModelConfig; raises CheckpointError on what it cannot honour.
    record: ModelConfig, recipe and optionally a FormatOf -> the step's programs.
    weights: ModelConfig -> weight buffer -> its source in the checkpoint.
    """

    architectures: tuple[str, ...]
    configure: Callable[[Mapping[str, Any], Shard], ModelConfig]
    record: Record
    weights: Callable[[ModelConfig], dict[str, WeightSource]]
