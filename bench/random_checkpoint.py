"""Checkpoints of a known shape with random weights, written by a GPU: a model to measure where none can be fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HEAD_SCALE = 3.0
"""Standard deviation of the logits: their largest stands out of rounding noise, as in trained models."""


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """(name, shape, standard deviation; 0 for a norm) of every tensor of a dense Llama or Qwen3."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[f"num_{which}_heads"] * config["head_dim"] for which in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (vocab, hidden), 1.0 if not config["tie_word_embeddings"] else hidden**-0.5
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"{layer}.{name}.weight", (rows, columns), columns**-0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (hidden,), 0.0
        if config.get("model_type") == "qwen3":
            for name in ("q_norm", "k_norm"):
                yield f"{layer}.self_attn.{name}.weight", (config["head_dim"],), 0.0
    yield "model.norm.weight", (hidden,), 0.0
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden), HEAD_SCALE * hidden**-0.5


def write(
    folder: Path, facts: Mapping[str, Any], layers: int | None = None, seed: int = 0, max_context: int = 0
) -> Path:
    """Write config.json and bf16 safetensors shards of up to 4 GiB. `layers`: fewer than the model has.
    `max_context`: the least that config.json allows."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in facts.items() if key != "source"}
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    config["torch_dtype"] = "bfloat16"
    config["max_position_embeddings"] = max(max_context, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator("cuda").manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, shape, deviation in tensors(config):
        values = torch.randn(shape, generator=generator, device="cuda")
        values = 1.0 + 0.1 * values if deviation == 0.0 else values * deviation
        tensor = values.bfloat16().cpu()
        if size + tensor.nbytes > 4 << 30:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    index = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file)
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
