"""GGUF metadata in the spelling of Hugging Face's config.json."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from atlas.errors import CheckpointError
from atlas.targets.layers import MAX_LAYERS
from atlas.weights.gguf_names import ARCHITECTURES

log = logging.getLogger(__name__)

# Fields that say nothing about the arithmetic, or that config_from_metadata reads.
_READ = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
}
# Fields that change what the model computes -> the value, beside 0, that changes nothing. Refused where the
# architecture does not have them.
_CHANGING: dict[str, Any] = {
    "attention.sliding_window": None,
    "attention.scale": None,
    "attention.clamp_kqv": None,
    "attention.max_alibi_bias": None,
    "attention.layer_norm_epsilon": None,
    "attention.sliding_window_pattern": None,
    "attention.temperature_length": None,
    "attention.temperature_scale": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "use_parallel_residual": None,
    "tensor_data_layout": "reference",
    "expert_count": None,
    "expert_shared_count": None,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 1,  # softmax
    "leading_dense_block_count": None,
    "rope.freq_base_swa": None,
    "rope.scaling.yarn_ext_factor": None,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": None,
    "rope.scaling.alpha": None,
}


def check_architecture(metadata: Mapping[str, Any], file: str) -> str:
    """The value of general.architecture, which must be one that is known."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            file,
            f"general.architecture is {architecture!r}",
            ", ".join(ARCHITECTURES),
            "use a model of a known architecture",
        )
    return architecture


class _Fields:
    """The metadata of one architecture, read with checks that name the field."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, file: str) -> None:
        self.metadata, self.prefix, self.file = metadata, architecture + ".", file

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.metadata.get(self.prefix + field, default)
        if value is None:
            raise CheckpointError(
                self.file, f"metadata field {self.prefix}{field} is missing", fix="convert the model again"
            )
        # Per-layer lists are how GGUF writes models whose layers differ; equal entries are one number.
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(self.file, f"{self.prefix}{field} is {value!r}", "one integer of at least 1")
        return value

    def has(self, field: str) -> bool:
        """The field is there and not 0, which llama.cpp takes for absent."""
        return bool(self.metadata.get(self.prefix + field))

    def window(self) -> int | None:
        """The sliding window; null where there is none."""
        return self.integer("attention.sliding_window") if self.has("attention.sliding_window") else None

    def number(self, field: str, default: float | None = None) -> float:
        value = self.metadata.get(self.prefix + field, default)
        if value is None:
            raise CheckpointError(
                self.file, f"metadata field {self.prefix}{field} is missing", fix="convert the model again"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(self.file, f"{self.prefix}{field} is {value!r}", "a number above 0")
        # GGUF holds float32; the decimal number that was meant (1e-05) is the shortest that rounds to it.
        return float(str(np.float32(value)))


def config_from_metadata(
    metadata: Mapping[str, Any], tensor_names: Collection[str], vocab_size: int | None, file: str
) -> dict[str, Any]:
    """config.json as Hugging Face would have it.

    Args:
        metadata: the GGUF's fields; vocabulary arrays may be left out.
        tensor_names: GGUF names, which tell tied embeddings and biases.
        vocab_size: rows of the embedding, used when metadata does not say.
        file: named in errors.

    Raises:
        CheckpointError: a required field is missing or wrong, or one asks for arithmetic not built.
    """
    name = check_architecture(metadata, file)
    architecture, fields = ARCHITECTURES[name], _Fields(metadata, name, file)
    prefix = fields.prefix
    for key, value in metadata.items():
        field = key.removeprefix(prefix)
        if field == key or field in architecture.fields:
            continue
        if field in _CHANGING and value and value != _CHANGING[field]:
            raise CheckpointError(file, f"{key} is {value!r}", f"a {name} model without it")
        if field not in _READ and field not in _CHANGING:
            log.warning("%s: metadata field %s is not known and has no effect", file, key)
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    if hidden % heads and prefix + "attention.key_length" not in metadata:
        raise CheckpointError(
            file,
            f"{prefix}embedding_length {hidden} is no multiple of {prefix}attention.head_count {heads}",
            f"a multiple, or {prefix}attention.key_length",
        )
    head_dim = fields.integer("attention.key_length", hidden // heads)
    turned = fields.integer("rope.dimension_count", head_dim)
    for field, size in (("attention.value_length", fields.integer("attention.value_length", head_dim)),) + (
        (("rope.dimension_count", turned),) if name != "phi3" else ()
    ):
        if size != head_dim:
            raise CheckpointError(
                file, f"{prefix}{field} is {size}", f"{head_dim}, the size of a head, for this architecture"
            )
    layers = fields.integer("block_count")
    if layers > MAX_LAYERS:
        raise CheckpointError(file, f"{prefix}block_count is {layers}", f"at most {MAX_LAYERS}")
    stems = {tensor.split(".", 2)[-1] for tensor in tensor_names if tensor.startswith("blk.")}
    config = {
        "architectures": [architecture.hugging_face],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields),
        "max_position_embeddings": fields.integer("context_length"),
        "vocab_size": fields.integer("vocab_size", vocab_size),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": "attn_output.bias" in stems,
        "qkv_bias": bool(stems & {"attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias"}),
        "mlp_bias": bool(stems & {"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if name in _OWN_FIELDS:
        config |= _OWN_FIELDS[name](fields, config, tensor_names)
    return config


def _llama(fields: _Fields, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Mistral is converted as llama; its window tells them apart."""
    window = fields.window()
    return (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window} if window else {}
    )


def _gemma3(fields: _Fields, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The scale of the scores and the pattern of layers are llama.cpp's, which the converter does not write."""
    layers, scalar = config["num_hidden_layers"], config["head_dim"]
    if layers == 62:  # the 27B model
        scalar = config["hidden_size"] // config["num_attention_heads"]
    if fields.has("attention.scale"):
        scalar = fields.number("attention.scale") ** -2
    pattern = fields.metadata.get(fields.prefix + "attention.sliding_window_pattern", 6)
    found = {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields.window(),
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
    }
    if isinstance(pattern, list):
        return found | {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}
    return found | {"sliding_window_pattern": pattern}


def _phi3(fields: _Fields, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {
        "sliding_window": fields.window(),
        "partial_rotary_factor": fields.integer("rope.dimension_count", config["head_dim"]) / config["head_dim"],
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _granite(fields: _Fields, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """llama.cpp takes a scale of 0, or none, for the plain one."""
    names = ("embedding_scale", "embedding_multiplier"), ("residual_scale", "residual_multiplier")
    found = {ours: fields.number(theirs) for theirs, ours in names if fields.has(theirs)}
    if fields.has("logit_scale"):
        found["logits_scaling"] = fields.number("logit_scale")
    scale = fields.number("attention.scale") if fields.has("attention.scale") else config["head_dim"] ** -0.5
    return found | {"attention_multiplier": scale}


def _qwen3moe(fields: _Fields, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", config["intermediate_size"]),
        "norm_topk_prob": bool(fields.metadata.get(fields.prefix + "expert_weights_norm", True)),
        "mlp_only_layers": [
            i for i in range(config["num_hidden_layers"]) if f"blk.{i}.ffn_gate_inp.weight" not in tensors
        ],
    }


_OWN_FIELDS = {"llama": _llama, "gemma3": _gemma3, "phi3": _phi3, "granite": _granite, "qwen3moe": _qwen3moe}
"""What an architecture's config.json has beside what all have."""


def _rope_scaling(fields: _Fields) -> dict[str, Any] | None:
    # llama.cpp's default, and its older name of the factor.
    stated = next((name for name in ("rope.scaling.factor", "rope.scale_linear") if fields.has(name)), "")
    kind = fields.metadata.get(fields.prefix + "rope.scaling.type", "linear" if stated else "none")
    stretch = fields.number("rope.scaling.attn_factor", 1.0)
    if kind in ("none", "longrope"):  # the lists of LongRoPE are tensors: add_rope_factors
        return None
    if kind == "linear" and stretch == 1.0:
        return {"rope_type": "linear", "factor": fields.number(stated or "rope.scaling.factor")}
    if kind == "yarn":
        factor = fields.number("rope.scaling.factor")
        found = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
        }
        for ends in ("fast", "slow"):
            if fields.has(f"rope.scaling.yarn_beta_{ends}"):
                found[f"beta_{ends}"] = fields.number(f"rope.scaling.yarn_beta_{ends}")
        if stretch != 1.0:
            found["attention_factor"] = stretch * (1.0 + 0.1 * math.log(max(factor, 1.0)))
        return found
    if kind == "linear":
        raise CheckpointError(fields.file, f"{fields.prefix}rope.scaling.attn_factor is {stretch}", "1 beside linear")
    raise CheckpointError(fields.file, f"{fields.prefix}rope.scaling.type is {kind!r}", "none, linear, yarn, longrope")


def add_rope_factors(
    config: dict[str, Any], factors: Mapping[str, npt.NDArray[np.float32]], metadata: Mapping[str, Any], file: str
) -> None:
    """Put the divisors of RoPE frequencies into `rope_scaling`, where Hugging Face has them.

    Args:
        factors: by the values of ROPE_FACTORS, float32 [rotary_dim / 2]: one list for every length (Llama 3, whose
            four parameters the converter drops), or a short and a long one (LongRoPE).

    Raises:
        CheckpointError: a list is missing, or there is another scheme beside them.
    """
    fields = _Fields(metadata, check_architecture(metadata, file), file)
    lists = {name: [float(value) for value in array.ravel()] for name, array in factors.items()}
    scaling = config["rope_scaling"] or {}
    if scaling or len(lists) != ("factors" not in lists) + 1:
        raise CheckpointError(
            file,
            f"frequency factors {', '.join(sorted(lists))} beside rope.scaling.type {scaling.get('rope_type', 'none')}",
            "factors alone, or short_factor and long_factor",
        )
    if "factors" in lists:
        config["rope_scaling"] = {"rope_type": "factors", **lists}
        return
    original = fields.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    stretch = fields.number("rope.scaling.attn_factor", 1.0)
    config["rope_scaling"] = {"rope_type": "longrope", "attention_factor": stretch, **lists}


def generation_config_from_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: where to begin, and every id that ends a turn."""
    prefix = "tokenizer.ggml."
    ends = [metadata.get(prefix + field) for field in ("eos_token_id", "eot_token_id", "eom_token_id")]
    result: dict[str, Any] = {}
    if unique := sorted({end for end in ends if isinstance(end, int)}):
        result["eos_token_id"] = unique
    if isinstance(bos := metadata.get(prefix + "bos_token_id"), int):
        result["bos_token_id"] = bos
    return result
