"""Makes `families.npz`: transformers' float32 logits of tiny models of every family and option.

    pip install '.[oracle]' && python -m tests.oracle.make_families_oracle

Weights come from tests/family_models.py, which anyone can make again. Per case: CASE.logits float32
[3, vocab], the rows at ROWS of the fixed prompt of `ids`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests import family_models
from tests.oracle.make_tiny_oracle import ids

ORACLE = Path(__file__).with_name("families.npz")

ROWS = (7, 40, 99)

SEED = 5


def logits(folder: Path, prompt: list[int]) -> np.ndarray[Any, Any]:
    """transformers' logits [len(prompt), vocab] of a checkpoint, every tensor of which it must have used."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: keys for kind, keys in info.items() if keys}
    assert not wrong, f"{folder.name}: {wrong}"
    with torch.inference_mode():
        result: np.ndarray[Any, Any] = model.eval()(torch.tensor([prompt])).logits[0].numpy()
    return result


def main() -> None:
    arrays = {}
    for name in family_models.CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = family_models.write(Path(folder) / name, name, SEED)
            arrays[f"{name}.logits"] = logits(path, ids(family_models.VOCAB))[list(ROWS)]
        print(name)
    np.savez_compressed(ORACLE, **arrays)
    print(f"{ORACLE}: {ORACLE.stat().st_size} bytes, {len(arrays)} cases")


if __name__ == "__main__":
    main()
