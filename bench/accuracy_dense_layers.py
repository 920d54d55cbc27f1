"""Accuracy of a model that Atlas does not serve yet, by its dense layers: formats of weights, inputs rounded to int8.

    python bench/accuracy_dense_layers.py MODEL_DIR --ids FILE.safetensors --out FILE.json

Needs torch and transformers (the `oracle` extra). The model runs in transformers in float32; every torch.nn.Linear but
the head and routers gets weights that Atlas's own quantisers made and dequantised, and, for int4 and int8, inputs
rounded to int8 in groups of 32 as op linear_a8 does it. FILE.safetensors holds ids as tensors `*.ids`. Printed per
format: perplexity over all texts, its change, mean KL of the next-token distributions, and how often the first choice
is the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from atlas.weights.quantizers import quantize_rows

FORMATS = {"float": None, "bf16": "bf16", "int8": "i8g32", "int4": "i4g32m"}


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row to int8 in groups of 32 and back: the input side of op linear_a8."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    codes = torch.where(largest > 0, torch.round(groups * (127 / largest)), torch.zeros_like(groups))
    return (codes * (largest / 127)).flatten(-2)[..., : x.shape[-1]]


def dense(model: Any) -> dict[str, torch.nn.Linear]:
    """The linears that every token passes: no head, no router."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features > 32 and not name.endswith("lm_head")
    }


def put(layers: dict[str, torch.nn.Linear], original: dict[str, torch.Tensor], format: str | None) -> list[Any]:
    """Give every layer its weights in `format`; the hooks that round inputs are returned, to be removed."""
    hooks = []
    for name, layer in layers.items():
        weight = original[name]
        if format == "bf16":
            weight = weight.to(torch.bfloat16).float()
        elif format:
            weight = torch.from_numpy(quantize_rows(weight.numpy(), format, name).dequantize())
            hooks.append(layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),)))
        layer.weight.data = weight
    return hooks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    texts = [torch.from_numpy(a.astype(np.int64))[None] for n, a in load_file(given.ids).items() if n.endswith(".ids")]
    texts = [text for text in texts if text.shape[-1] > 1]
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    layers = dense(model)
    original = {name: layer.weight.data.clone() for name, layer in layers.items()}
    result: dict[str, Any] = {"model": given.model.name, "layers": len(layers), "tokens": sum(t.numel() for t in texts)}
    base: list[torch.Tensor] = []
    for name, format in FORMATS.items():
        hooks = put(layers, original, format)
        nll, kl, same, count = 0.0, 0.0, 0, 0
        for i, text in enumerate(texts):
            with torch.inference_mode():
                logprobs = torch.log_softmax(model(text).logits[0, :-1].double(), -1)
            if name == "float":
                base.append(logprobs)
            nll -= float(logprobs.gather(1, text[0, 1:, None]).sum())
            kl += float((base[i].exp() * (base[i] - logprobs)).sum())
            same += int((base[i].argmax(-1) == logprobs.argmax(-1)).sum())
            count += len(logprobs)
        for hook in hooks:
            hook.remove()
        row = {"perplexity": float(np.exp(nll / count)), "kl": kl / count, "top1": same / count}
        row["change_percent"] = 100 * (row["perplexity"] / result.get("float", row)["perplexity"] - 1)
        result[name] = {key: round(value, 6) for key, value in row.items()}
        print(name, result[name], flush=True)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
