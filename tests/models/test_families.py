"""Tiny models of every family and option against transformers' float32 logits (tests/oracle/families.npz)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import family_models
from tests.models import run
from tests.models.test_smollm2 import REL_L2, REL_L2_BF16, relative_l2
from tests.oracle.make_families_oracle import ORACLE, ROWS, SEED
from tests.oracle.make_tiny_oracle import ids


@pytest.mark.parametrize("name", sorted(family_models.CASES))
def test_logits(tmp_path: Path, name: str) -> None:
    """In chunks of 37 tokens, which cut KV blocks and windows."""
    folder = family_models.write(tmp_path / name, name, SEED)
    with np.load(ORACLE) as oracle:
        expected = oracle[f"{name}.logits"]
    for backend, quant, bound in (
        ("reference", "f32", REL_L2),
        ("cpu", "f32", REL_L2),
        ("cpu", "bf16", REL_L2_BF16),
    ):
        actual = run.logits(run.load(folder, backend, quant), ids(family_models.VOCAB), chunk=37)[list(ROWS)]
        error = relative_l2(actual, expected)
        print(f"{name} {backend} {quant}: relative L2 {error:.2e}")
        assert error <= bound, (backend, quant)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_decoding_across_the_original_length_is_as_a_fresh_prefill(tmp_path: Path, backend: str) -> None:
    """LongRoPE changes the frequencies of every position with the 33rd token; rows of a step take turns."""
    folder = family_models.write(tmp_path, "llama-longrope", SEED)
    runner = run.load(folder, backend, "f32", max_rows=20, max_seqs=4, max_logits=20)
    prompts = [ids(family_models.VOCAB)[:length] for length in (29, 31, 32, 40)]
    for prompt, tokens in zip(prompts, run.greedy(runner, prompts, 6, together=4), strict=True):
        for count in range(6):
            logits = run.logits(runner, prompt + tokens[:count], chunk=20)[-1]
            lead = logits[tokens[count]] - np.delete(logits, tokens[count]).max()
            assert lead > -1e-3, f"token {count} after {len(prompt)}"


def test_a_wrong_reading_is_far_off(tmp_path: Path) -> None:
    """The bounds tell: each of these changes is one that another engine has made by mistake."""
    mistakes: dict[str, dict[str, object]] = {
        "qwen2-upper-window": {"max_window_layers": 0},
        "qwen3-layer-types": {"layer_types": ["full_attention"] * 3},
        "mistral-window": {"sliding_window": 9},
        "gemma3": {"query_pre_attn_scalar": 32},
        "gemma3-scaled": {"rope_local_base_freq": 50000.0},
        "granite": {"residual_multiplier": 1.0},
        "llama-yarn": {"rope_scaling": None},
        "llama-longrope": {"original_max_position_embeddings": 128},
        "llama-gelu": {"hidden_act": "silu"},
        "phi3-partial": {"partial_rotary_factor": 1.0},
    }
    for name, changes in mistakes.items():
        folder = family_models.write(tmp_path / name, name, SEED)
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stated | changes))
        with np.load(ORACLE) as oracle:
            expected = oracle[f"{name}.logits"]
        actual = run.logits(run.load(folder, "reference", "f32"), ids(family_models.VOCAB))[list(ROWS)]
        assert relative_l2(actual, expected) > 2 * REL_L2_BF16, name
