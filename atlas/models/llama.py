"""Llama: Llama 2/3/3.x and SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError
from atlas.models import decoder, rope
from atlas.models.family import Family, ModelConfig, WeightSource, read_config
from atlas.targets.shape import Shard

_REFUSED = (
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "logit_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
)
"""Fields that change what a model computes and that this family does not apply: refused, never ignored."""


def configure(config: Mapping[str, Any], shard: Shard) -> ModelConfig:
    """Check a Llama config.json. `tie_word_embeddings` absent means false (the family's default)."""
    for field in _REFUSED:
        if config.get(field):
            raise CheckpointError("config.json", f"{field} is {config[field]!r}", "a Llama model without it")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise CheckpointError("config.json", f"partial_rotary_factor is {config['partial_rotary_factor']!r}", "1.0")
    return read_config(config, shard, tied_default=False, rope=rope.inv_freq)


def weights(config: ModelConfig) -> dict[str, WeightSource]:
    """Weight buffer -> tensors of a Hugging Face Llama checkpoint."""
    table = {
        "embedding.weight": WeightSource(("model.embed_tokens.weight",)),
        "final_norm.weight": WeightSource(("model.norm.weight",)),
        "rope.inv_freq": WeightSource(values=config.inv_freq),
    }
    shape = config.shape
    q_rows, kv_rows = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    if not config.tied:
        table["lm_head.weight"] = WeightSource(("lm_head.weight",))
    for i in range(config.n_layers):
        source, layer = f"model.layers.{i}", f"layers.{i}"
        attention, mlp = f"{source}.self_attn", f"{source}.mlp"
        table |= {
            f"{layer}.attention_norm.weight": WeightSource((f"{source}.input_layernorm.weight",)),
            f"{layer}.qkv.weight": WeightSource(
                tuple(f"{attention}.{p}_proj.weight" for p in "qkv"), (q_rows, kv_rows, kv_rows)
            ),
            f"{layer}.o.weight": WeightSource((f"{attention}.o_proj.weight",)),
            f"{layer}.mlp_norm.weight": WeightSource((f"{source}.post_attention_layernorm.weight",)),
            f"{layer}.gate_up.weight": WeightSource(
                (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), (shape.intermediate_size,) * 2
            ),
            f"{layer}.down.weight": WeightSource((f"{mlp}.down_proj.weight",)),
        }
    return table


LLAMA = Family(("LlamaForCausalLM",), configure, decoder.record, weights)
