"""Activation-aware scales: the model stays the same before rounding, and is nearer to it afterwards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas.progress import Progress
from atlas.quantize import activation_aware, calibration
from atlas.quantize.job import Options, plan, run
from atlas.weights import Checkpoint, open_checkpoint
from tests import family_models
from tests.models.run import load, logits
from tests.quantize.conftest import write_model
from tests.quantize.test_layouts import stored

Array = np.ndarray[Any, Any]


def outliers(folder: Path, seed: int, dtype: Any = np.float32, **changes: Any) -> Path:
    """A model some of whose channels carry activations 20 times those of others, as in trained models."""
    return with_outliers(write_model(folder, seed, dtype, **changes), seed)


def with_outliers(model: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    tensors = {name: values.copy() for name, values in load_file(model / "model.safetensors").items()}
    for name, values in tensors.items():
        if name.endswith("layernorm.weight"):
            values[rng.choice(len(values), 6, replace=False)] *= 20
        if name.endswith(("up_proj.weight", "v_proj.weight", "qkv_proj.weight")):
            values[rng.choice(len(values), 4, replace=False)] *= 10
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def inputs_of(checkpoint: Checkpoint) -> tuple[dict[str, calibration.Inputs], list[int]]:
    ids = np.random.default_rng().integers(0, 320, 256).tolist()
    return calibration.collect_ids(checkpoint, ids, Progress()), ids


def rewritten(source: Path, folder: Path, tensors: dict[str, Array]) -> Path:
    """The checkpoint with other values."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "family",
    ["llama", "llama-biases", "mistral-window", "qwen3-biases", "gemma3", "phi3", "granite-biases", "moe-dense-layer"],
)
def test_the_changes_leave_the_model_as_it_was(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor changed and none rounded: the logits are those of the original, in every family."""
    seed = int(np.random.default_rng().integers(1 << 30))
    if family == "llama":
        model = outliers(tmp_path / "model", seed, num_key_value_heads=1)
    else:
        # Sizes that groups divide.
        monkeypatch.setitem(family_models.BASE, "intermediate_size", 192)
        monkeypatch.setitem(family_models.FAMILIES["moe"], "moe_intermediate_size", 64)
        model = with_outliers(family_models.write(tmp_path / "model", family, seed % 1000), seed)
    options = Options("int4-awq", "compressed-tensors", "32", calibration="stands for a text")
    with open_checkpoint(model) as checkpoint:
        inputs, ids = inputs_of(checkpoint)
        layout, selection = plan(checkpoint, options)
        changes = activation_aware.search(checkpoint, inputs, selection, layout, Progress())
        values = {
            name: changes.get(name, activation_aware.Change()).apply(np.asarray(checkpoint.read(name), np.float32))
            for name in checkpoint.tensors
        }
    # Both norms, v and up have outliers: most sets must have found scales, of every kind.
    dense = [linear.tensor for linear in selection.linears if ".experts." not in linear.module]
    assert sum(name in changes and changes[name].columns is not None for name in dense) > 0.6 * len(dense)
    assert any(change.values is not None for change in changes.values())
    assert any(change.rows is not None for change in changes.values())
    assert not any(".experts." in name or ".mlp.gate." in name for name in changes)
    expected = logits(load(model, "cpu", "f32"), ids)
    actual = logits(load(rewritten(model, tmp_path / "changed", values), "cpu", "f32"), ids)
    # Sharp attention over outliers enlarges what float32 rounds; a forgotten bias gives 0.06, a forgotten 1 + w 0.25.
    assert relative(actual, expected) < 1e-3


def test_norms_in_bfloat16_are_divided_without_rounding(tmp_path: Path) -> None:
    import ml_dtypes

    model = outliers(tmp_path / "model", 3, ml_dtypes.bfloat16)
    with open_checkpoint(model) as checkpoint:
        inputs, _ = inputs_of(checkpoint)
        layout, selection = plan(checkpoint, Options("int4-awq", group="32", calibration="stands for a text"))
        changes = activation_aware.search(checkpoint, inputs, selection, layout, Progress())
        norms = [name for name in changes if name.endswith("layernorm.weight")]
        assert len(norms) == 4
        for name in norms:
            values = changes[name].apply(np.zeros(0, np.float32))
            np.testing.assert_allclose(values.astype(ml_dtypes.bfloat16).astype(np.float32), values, rtol=1e-6)


def relative(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("layout", ["compressed-tensors", "awq", "gptq"])
def test_outputs_come_nearer_than_by_rounding_to_nearest(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run of the command's job, read back by Atlas; new tokens, not those of the calibration."""
    model = outliers(tmp_path / "model", int(np.random.default_rng().integers(1 << 30)))
    seen = np.random.default_rng().integers(0, 320, 512).tolist()
    monkeypatch.setattr(
        calibration,
        "collect",
        lambda checkpoint, text, tokens, progress: calibration.collect_ids(checkpoint, seen, progress),
    )
    with open_checkpoint(model) as checkpoint:
        options = Options("int4", layout, "64", zero_point=layout == "gptq")
        run(checkpoint, tmp_path / "rounded", options)
        aware = dataclasses.replace(options, format="int4-awq", calibration="stands for a text")
        run(checkpoint, tmp_path / "aware", aware)
    ids = np.random.default_rng().integers(0, 320, 200).tolist()
    exact = logits(load(model, "cpu", "f32"), ids)
    plain, better = (dequantised(tmp_path / name, tmp_path / f"{name}-f32") for name in ("rounded", "aware"))
    loss, aware_loss = (relative(logits(load(folder, "cpu", "f32"), ids), exact) for folder in (plain, better))
    assert aware_loss < 0.9 * loss, (aware_loss, loss)  # 0.66 to 0.76 of it over a dozen random models


def dequantised(folder: Path, to: Path) -> Path:
    """A quantised checkpoint as plain float32."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (to / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        tensors = {name: np.asarray(checkpoint.read(name), np.float32) for name in checkpoint.tensors}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_calibration_sees_what_enters_each_matrix(model: Path) -> None:
    """Against NumPy: the first norm's output, which is the input of the first q, k and v."""
    with open_checkpoint(model) as checkpoint:
        inputs, ids = inputs_of(checkpoint)
        embedded = np.asarray(checkpoint.read("model.embed_tokens.weight"), np.float64)[ids]
        weight = np.asarray(checkpoint.read("model.layers.0.input_layernorm.weight"), np.float64)
        config = checkpoint.config
    x = embedded / np.sqrt((embedded**2).mean(axis=1, keepdims=True) + config["rms_norm_eps"]) * weight
    for name in "qkv":
        seen = inputs[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert seen.absmax == pytest.approx(np.abs(x).max(), rel=1e-5)
        np.testing.assert_allclose(seen.mean_abs, np.abs(x).mean(axis=0), rtol=1e-4)
        np.testing.assert_allclose(seen.mean_square, (x**2).mean(axis=0), rtol=1e-4)
        np.testing.assert_allclose(seen.rows, x, rtol=1e-4, atol=1e-5)
    assert len(inputs) == 7 * config["num_hidden_layers"]


def test_modelopt_stores_what_calibration_saw(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(model) as checkpoint:
        inputs, _ = inputs_of(checkpoint)
        monkeypatch.setattr(calibration, "collect", lambda *arguments: inputs)
        for format, limit in (("fp8", 448), ("nvfp4", 6 * 448)):
            run(checkpoint, tmp_path / format, Options(format, "modelopt", calibration="stands for a text"))
            tensors = stored(tmp_path / format)
            for tensor, seen in inputs.items():
                scale = tensors[tensor.replace(".weight", ".input_scale")]
                assert scale.shape == ()
                assert float(scale) == pytest.approx(seen.absmax / limit, rel=1e-6)
        with open_checkpoint(tmp_path / "fp8") as written:
            name = "model.layers.0.self_attn.o_proj.weight"
            assert relative(np.asarray(written.read(name)), np.asarray(checkpoint.read(name), np.float32)) < 0.04
