"""GGUF metadata and tensor names in Hugging Face's spelling."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from atlas.errors import CheckpointError

log = logging.getLogger(__name__)

ARCHITECTURES = ("llama",)

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")

# Carries Llama 3's frequency factors, which belong to the configuration (see llama3_scaling).
ROPE_FACTORS = "rope_freqs.weight"

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
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
}
# Fields that change what the model computes; Llama as built here does not do these.
_REFUSED = {
    "attention.sliding_window",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.layer_norm_epsilon",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "use_parallel_residual",
    "tensor_data_layout",
}


def hf_name(name: str) -> str | None:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; None for an unknown tensor."""
    if match := _LAYER_TENSOR.match(name):
        layer, stem, kind = match.groups()
        return f"model.layers.{int(layer)}.{_LAYER_NAMES[stem]}.{kind}" if stem in _LAYER_NAMES else None
    stem, _, kind = name.rpartition(".")
    return f"{_GLOBAL_NAMES[stem]}.{kind}" if stem in _GLOBAL_NAMES and kind in ("weight", "bias") else None


def check_architecture(metadata: Mapping[str, Any], file: str) -> str:
    """The value of general.architecture, which must be one that is known."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            file,
            f"general.architecture is {architecture!r}",
            ", ".join(ARCHITECTURES),
            "use a model of a known architecture",
        )
    return str(architecture)


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
    architecture = check_architecture(metadata, file)
    fields = _Fields(metadata, architecture, file)
    prefix = fields.prefix
    for key in metadata:
        field = key.removeprefix(prefix)
        if field != key and field in _REFUSED and metadata[key]:
            raise CheckpointError(file, f"{key} is {metadata[key]!r}", "a Llama model without it")
        if field != key and field not in _READ | _REFUSED:
            log.warning("%s: metadata field %s is not known and has no effect", file, key)
    if metadata.get(prefix + "expert_count"):
        raise CheckpointError(
            file,
            f"{prefix}expert_count is {metadata[prefix + 'expert_count']}",
            "dense Llama models from GGUF",
        )
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    if hidden % heads and prefix + "attention.key_length" not in metadata:
        raise CheckpointError(
            file,
            f"{prefix}embedding_length {hidden} is no multiple of {prefix}attention.head_count {heads}",
            f"a multiple, or {prefix}attention.key_length",
        )
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for field in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(field, head_dim) != head_dim:
            raise CheckpointError(
                file,
                f"{prefix}{field} is {fields.integer(field)}",
                f"{head_dim}, the size of a head, for this architecture",
            )
    stems = {name.split(".", 2)[-1] for name in tensor_names if name.startswith("blk.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
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
        "attention_bias": bool(stems & {"attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"}),
        "mlp_bias": bool(stems & {"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _rope_scaling(fields: _Fields) -> dict[str, Any] | None:
    kind = fields.metadata.get(fields.prefix + "rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": fields.number("rope.scaling.factor"),
            "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
        }
    raise CheckpointError(fields.file, f"{fields.prefix}rope.scaling.type is {kind!r}", "none, linear, yarn")


def llama3_scaling(factors: npt.NDArray[np.float32], config: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Llama 3's rope_scaling from the factors that GGUF stores instead of its four parameters.

    The parameters cannot be read off in general, but every published model uses the same bands, so
    these are tried and the factors they give are compared with the file's.

    Args:
        factors: float32 [head_dim / 2], what each frequency is divided by.

    Raises:
        CheckpointError: the factors are not Llama 3's.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max())
    dim = int(config["head_dim"])
    turns = original * float(config["rope_theta"]) ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise CheckpointError(
            file,
            f"tensor {ROPE_FACTORS} holds frequency factors that are not Llama 3's",
            f"low_freq_factor {low:g}, high_freq_factor {high:g}, original length {original}",
            "use the model's safetensors files",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


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


def unpermute_rows(array: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of a q or k projection from GGUF's order back to Hugging Face's.

    llama.cpp rotates neighbouring pairs, Hugging Face a head's first half against its second, so the
    converter interleaved the halves of each head. array: [heads * head_dim, ...].
    """
    rows = array.shape[0]
    split = array.reshape(heads, rows // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)
