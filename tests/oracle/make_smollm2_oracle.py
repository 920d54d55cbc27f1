"""Makes `smollm2.npz`: what transformers computes in float32 for SmolLM2-135M-Instruct.

    pip install '.[oracle]' && python -m tests.oracle.make_smollm2_oracle

transformers reads the GGUF with its own reader, name map and dequantisation; only token ids come from
Atlas's tokeniser, whose own oracle is llama.cpp. Arrays, per logits prompt NAME:
    NAME.ids int32 [T], NAME.columns float32 [T, 64] (logits of evenly spread ids), NAME.logsumexp and
    NAME.argmax [T], NAME.last float32 [vocab]
and for the greedy prompts, i = 0..19: greedy.i.ids, greedy.i.tokens int32 [64], and greedy.i.gap
float32 [64], the lead of each token's logit over the second best.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from atlas.tokenizer import Tokenizer
from atlas.weights import open_checkpoint
from atlas.weights.fetch import resolve_model
from tests.oracle.prompts import CHAT, COLUMNS, GREEDY_PROMPTS, GREEDY_TOKENS, LOGIT_PROMPTS

ORACLE = Path(__file__).with_name("smollm2.npz")
LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"


def load_model(path: Path) -> Any:
    """transformers' model from the GGUF, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def logits_of(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits [len(ids), vocab] float32."""
    import torch

    with torch.inference_mode():
        result: np.ndarray[Any, Any] = model(torch.tensor([ids])).logits[0].float().numpy()
    return result


def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """`count` greedy tokens (ends of turn do not stop) and the lead of each over the runner-up."""
    import torch

    tokens, gaps, cache = [], [], None
    with torch.inference_mode():
        step = torch.tensor([ids])
        for _ in range(count):
            output = model(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            best = torch.topk(output.logits[0, -1].float(), 2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            step = best.indices[:1].view(1, 1)
    return tokens, gaps


def prompts() -> tuple[dict[str, list[int]], list[list[int]]]:
    """Ids of the logits prompts by name, and of the greedy prompts."""
    with open_checkpoint(resolve_model("smollm2-135m", offline=False)) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
    texts = {name: text or LICENSE.read_text() for name, text in LOGIT_PROMPTS.items()}
    named = {name: tokenizer.encode(text, add_special_tokens=False)[:1000] for name, text in texts.items()}
    chats = [tokenizer.encode(CHAT.format(text), add_special_tokens=False) for text in GREEDY_PROMPTS]
    return named, chats


def main() -> None:
    model = load_model(resolve_model("smollm2-135m", offline=False))
    named, chats = prompts()
    arrays: dict[str, Any] = {}
    for name, ids in named.items():
        logits = logits_of(model, ids)
        columns = np.linspace(0, logits.shape[1] - 1, COLUMNS).astype(np.int64)
        arrays[f"{name}.ids"] = np.array(ids, np.int32)
        arrays[f"{name}.columns"] = logits[:, columns]
        wide = logits.astype(np.float64)
        peak = wide.max(axis=1)
        arrays[f"{name}.logsumexp"] = (peak + np.log(np.exp(wide - peak[:, None]).sum(axis=1))).astype(np.float32)
        arrays[f"{name}.argmax"] = logits.argmax(axis=1).astype(np.int32)
        arrays[f"{name}.last"] = logits[-1]
        print(f"{name}: {len(ids)} ids")
    for i, ids in enumerate(chats):
        tokens, gaps = greedy(model, ids, GREEDY_TOKENS)
        arrays[f"greedy.{i}.ids"] = np.array(ids, np.int32)
        arrays[f"greedy.{i}.tokens"] = np.array(tokens, np.int32)
        arrays[f"greedy.{i}.gap"] = np.array(gaps, np.float32)
        print(f"greedy {i}: smallest gap {min(gaps):.4f}")
    np.savez_compressed(ORACLE, **arrays)
    print(f"{ORACLE}: {ORACLE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
