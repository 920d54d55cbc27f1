"""Quantised checkpoints through the runner: in f32, the logits of the model with the same values stored plainly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atlas.targets.formats import INTEGER_FORMATS, common
from atlas.targets.quant import E4M3_WEIGHTS
from tests import tiny_model
from tests.models import run
from tests.weights.quantized_files import LAYOUTS, write, write_model
from tests.weights.test_schemes import EXACT_FORMATS

BLOCK_FORMATS = {layout: common([format], INTEGER_FORMATS) for layout, format in EXACT_FORMATS.items() if format}
"""Layout -> the smallest format of CPUs that holds it, or None."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_values(layout: str, tmp_path: Path) -> None:
    config = {**tiny_model.CONFIG, "num_hidden_layers": 1, "vocab_size": 40}
    tensors = tiny_model.tensors(config, seed=0)
    values = write_model(tmp_path / "quantised", layout, config, tensors, seed=1)
    ids = [1, 7, 39, 0, 12, 5]
    expected = run.logits(run.load(write(tmp_path / "plain", values, config), "cpu", "f32"), ids)
    np.testing.assert_array_equal(run.logits(run.load(tmp_path / "quantised", "cpu", "f32"), ids), expected)
    # As the checkpoint has it where the CPU has kernels for that, else bf16. These weights are noise, of any size, so
    # rounded activations cost much more than in a trained model; a wrong reading is another function, 1 or more off.
    runner = run.load(tmp_path / "quantised", "cpu", None)
    assert runner.buffers["layers.0.down.weight"].dtype == (BLOCK_FORMATS.get(layout) or "bf16")
    off = np.linalg.norm(run.logits(runner, ids) - expected) / np.linalg.norm(expected)
    assert off <= 0.3
    zeros = {name: array if "proj" not in name else array * 0 for name, array in values.items()}
    without = run.logits(run.load(write(tmp_path / "zeros", zeros, config), "cpu", "f32"), ids)
    assert np.abs(expected - without).max() > 1e-3  # the quantised weights do reach the logits


@pytest.mark.parametrize("layout", [layout for layout, format in EXACT_FORMATS.items() if format in E4M3_WEIGHTS])
def test_fp8_is_kept_exactly(layout: str, tmp_path: Path) -> None:
    """Joined matrices too, whose tensors have scales of their own."""
    config = {**tiny_model.CONFIG, "num_hidden_layers": 1, "vocab_size": 40}
    values = write_model(tmp_path, layout, config, tiny_model.tensors(config, seed=0), seed=1)
    runner = run.load(tmp_path, "reference", "fp8", max_context=64)
    for name, tensors in (
        ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
        ("down", ("mlp.down_proj",)),
    ):
        assert runner.buffers[f"layers.0.{name}.weight"].dtype == EXACT_FORMATS[layout]
        stored = [values[f"model.layers.0.{tensor}.weight"] for tensor in tensors]
        np.testing.assert_array_equal(runner.read(f"layers.0.{name}.weight"), np.concatenate(stored))
