"""Fixtures of the quantisation tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import tiny_model

CONFIG: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 64, "num_attention_heads": 4}
"""Sizes whose 128 x 128 blocks have partial edges and which only groups of 64 and 32 divide."""


def write_model(folder: Path, seed: int, dtype: Any = ml_dtypes.bfloat16, **changes: Any) -> Path:
    """A random checkpoint of bf16 weights with files beside it."""
    config = {**tiny_model.CONFIG, **CONFIG, **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "README.md").write_text("of the original")
    tensors = {name: values.astype(dtype) for name, values in tiny_model.tensors(config, seed).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for tests that do not change it."""
    seed = int(np.random.default_rng().integers(1 << 30))
    return write_model(tmp_path_factory.mktemp("model") / "tiny", seed)
