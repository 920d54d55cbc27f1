"""What a family file provides, and the model configuration that all families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from atlas.errors import CheckpointError
from atlas.runtime.program import StepPrograms
from atlas.targets.fields import config_field, text_config
from atlas.targets.layers import FULL, SLIDING, Layer, layers
from atlas.targets.quant import Recipe
from atlas.targets.rope import Rope, parameters, rope, scheme_of
from atlas.targets.shape import Shape, Shard, shape


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A config.json, checked: what loading and recording need beyond the shape.

    max_context: longest sequence the model was made for.   tied: the head is the token table.
    layers: what differs from layer to layer.               ropes: RoPE of each kind of layer.
    norm_offset: what the family adds to the norm weights that its files hold.
    logits_scale: of the logits.
    """

    architecture: str
    shape: Shape
    max_context: int
    tied: bool
    layers: tuple[Layer, ...]
    ropes: Mapping[str, Rope]
    norm_offset: float = 0.0
    logits_scale: float = 1.0

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def rope_switch(self) -> int:
        """Longest sequence that uses the first set of RoPE frequencies; 0 where there is only one."""
        return max(each.original_length for each in self.ropes.values())

    def rope_set(self, length: int) -> int:
        """Which set of RoPE frequencies every position of a sequence of `length` tokens uses (step field seq_rope)."""
        return int(0 < self.rope_switch < length)


_SCALES = (
    *("logits_scaling", "logit_scale", "embedding_multiplier", "residual_multiplier", "lm_head_multiplier"),
    *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "attention_value_scale", "scale_emb"),
    *(
        "embedding_scale",
        "residual_scale",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "rotary_pct",
        "rope_ratio",
    ),
)
_OPTIONS = (
    *("attention_multiplier", "query_pre_attn_scalar", "softmax_scale", "scale_depth", "attn_logit_softcapping"),
    *("final_logit_softcapping", "attn_logit_softcap", "clip_qkv", "attention_chunk_size", "swiglu_limit"),
    *("kv_lora_rank", "q_lora_rank", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("shared_expert_intermediate_size", "moe_num_experts", "num_nope_layers", "no_rope_layers"),
    *("no_rope_layer_interval", "use_bidirectional_attention", "alibi", "parallel_attn", "use_parallel_residual"),
    *("use_qk_norm", "qk_norm", "qk_layernorm", "attn_output_gate", "attention_sinks", "use_qkv_bias", "use_bias"),
    *("bias", "lm_head_bias", "rope_interleave", "rope_interleaved", "add_cross_attention", "is_encoder_decoder"),
    *("dual_chunk_attention_config", "sparse_attention_config", "use_logn_attn", "use_dynamic_ntk"),
)
_CHANGING: dict[str, Any] = {
    **dict.fromkeys(_SCALES, 1),
    **dict.fromkeys(_OPTIONS),
    "is_causal": True,
    "scoring_func": "softmax",
    "position_embedding_type": "rope",
}
"""Fields that change what some model computes -> the value, beside null, 0, empty and (but for is_causal) false,
that changes nothing. A family applies some (`applies`); the others it refuses: ignoring one gives fluent nonsense."""

_PARTIAL = ("Phi3ForCausalLM",)
"""Architectures that turn only the leading elements of a head. transformers' code of the others cannot."""


def read_config(
    config: Mapping[str, Any],
    shard: Shard,
    *,
    applies: Collection[str] = (),
    kinds: Collection[str] = (FULL,),
) -> ModelConfig:
    """The parts of config.json that every decoder family reads alike.

    Args:
        applies: fields of those that change the computation which the family's shape or file honours.
        kinds: kinds of attention layer that the family has.

    Raises:
        CheckpointError: a field is missing, absurd, contradicts another, or asks for what the family does not do.
    """
    config = text_config(config)
    name = config["architectures"][0]
    for field, neutral in _CHANGING.items():
        value = config.get(field)
        if field not in applies and value != neutral and (value or (neutral is True and value is False)):
            raise CheckpointError("config.json", f"{field} is {value!r}", f"a {name} without it")
    if config.get("sliding_window") and SLIDING not in kinds and config.get("use_sliding_window") is not False:
        raise CheckpointError("config.json", f"sliding_window is {config['sliding_window']!r}", f"a {name} without it")
    tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = False
    if not isinstance(tied, bool):
        raise CheckpointError("config.json", f"tie_word_embeddings is {tied!r}", "true or false")
    derived, each = shape(config, shard), layers(config)
    for i, layer in enumerate(each):
        if layer.kind not in kinds:
            raise CheckpointError("config.json", f"layer_types has {layer.kind!r} in layer {i}", ", ".join(kinds))
    if derived.rotary_dim and name not in _PARTIAL:
        raise CheckpointError(
            "config.json",
            f"partial_rotary_factor is {derived.rotary_dim / derived.head_dim:g}",
            f"1.0: {name} turns whole heads",
        )
    return ModelConfig(
        architecture=name,
        shape=derived,
        max_context=_max_context(config),
        tied=tied,
        layers=each,
        ropes={kind: rope(config, derived.head_dim, kind) for kind in dict.fromkeys(layer.kind for layer in each)},
    )


def _max_context(config: Mapping[str, Any]) -> int:
    """max_position_embeddings; YaRN, which is switched on by hand, reaches factor times the original length."""
    trained: int = config_field(config, "max_position_embeddings", int, 2048)
    found = parameters(config)
    if scheme_of(found) != "yarn":
        return trained
    original = config_field(found, "original_max_position_embeddings", int, trained)
    return max(trained, int(original * config_field(found, "factor", float, 1.0)))


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """Where a weight buffer's rows come from.

    tensors: checkpoint tensors, concatenated along the first axis.
    rows: of each tensor, where there are several; a single tensor has all rows of the buffer.
    values: computed values instead of tensors (RoPE frequencies).
    add, multiply: applied in fp32 to what the tensors hold, in this order, before the buffer rounds it.
    """

    tensors: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    add: float = 0.0
    multiply: float = 1.0


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
    weights: ModelConfig and the checkpoint's tensor names -> weight buffer -> its source in the checkpoint.
    other_parts: prefixes of tensors of parts that are not served (a vision tower).
    """

    architectures: tuple[str, ...]
    configure: Callable[[Mapping[str, Any], Shard], ModelConfig]
    record: Record
    weights: Callable[[ModelConfig, Collection[str]], dict[str, WeightSource]]
    other_parts: tuple[str, ...] = ()
