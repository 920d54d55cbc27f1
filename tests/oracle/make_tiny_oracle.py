"""Makes `tiny_llamas.npz`: transformers' float32 logits of tiny Llamas with every option of the family.

    pip install '.[oracle]' && python -m tests.oracle.make_tiny_oracle

Weights come from tests/tiny_model.py, which anyone can make again. Per variant: VARIANT.logits float32
[3, vocab], the rows at ROWS of the fixed prompt of `ids`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny_model

ORACLE = Path(__file__).with_name("tiny_llamas.npz")

ROWS = (0, 40, 99)

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 64},
    "eps": {"rms_norm_eps": 0.3},
    "rope-base": {"rope_theta": 500000.0},
    "rope-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope-llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
}
"""Changes of tests/tiny_model.py's configuration."""


def ids(vocab: int) -> list[int]:
    """100 ids: long enough that every rope scheme tells."""
    return [(17 * i * i + 5 * i + 3) % vocab for i in range(100)]


def checkpoint(folder: Path, variant: str) -> Path:
    """The variant's checkpoint, the same bytes each time. An untied one leaves the field out: the
    family's default is part of what is checked."""
    changes = VARIANTS[variant]
    path = tiny_model.write(folder, seed=11, **changes)
    if "tie_word_embeddings" not in changes:
        tiny_model.drop_field(path, "tie_word_embeddings")
    return path


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    arrays = {}
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            model = AutoModelForCausalLM.from_pretrained(checkpoint(Path(folder), variant), dtype=torch.float32).eval()
            with torch.inference_mode():
                logits = model(torch.tensor([ids(model.config.vocab_size)])).logits[0].numpy()
            arrays[f"{variant}.logits"] = logits[list(ROWS)]
    np.savez_compressed(ORACLE, **arrays)
    print(f"{ORACLE}: {ORACLE.stat().st_size} bytes, {len(arrays)} variants")


if __name__ == "__main__":
    main()
