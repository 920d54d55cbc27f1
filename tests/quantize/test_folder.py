"""The output folder and its files: complete or recognisably not, never over something else, in shards with an index."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from atlas.errors import CheckpointError, ConfigError
from atlas.quantize import folder
from atlas.quantize.__main__ import main
from atlas.quantize.job import Options, run
from atlas.quantize.layouts.layout import Layout
from atlas.quantize.selection import select
from atlas.quantize.writer import Writer
from atlas.weights import open_checkpoint
from atlas.weights.checkpoint import TensorInfo
from tests.quantize.conftest import write_model


def quantise(model: Path, output: Path, **options: Any) -> None:
    with open_checkpoint(model) as checkpoint:
        run(checkpoint, output, Options(options.pop("format", "int8"), **options))


def test_what_stands_beside_the_weights_is_copied(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "out")
    names = {entry.name for entry in (tmp_path / "out").iterdir()}
    expected = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert names == expected | {"quantization_report.json"}
    for name in ("tokenizer.json", "generation_config.json"):
        ours, theirs = (json.loads((place / name).read_text()) for place in (tmp_path / "out", model))
        assert ours == theirs
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    original = json.loads((model / "config.json").read_text())
    assert {**config, "quantization_config": None, "torch_dtype": None} == {
        **original,
        "quantization_config": None,
        "torch_dtype": None,
    }


def test_shards_hold_what_one_file_holds(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "one")
    quantise(model, tmp_path / "many", shard_bytes=100_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    total = 0
    with safe_open(tmp_path / "one" / "model.safetensors", "numpy") as whole:
        assert set(index["weight_map"]) == set(whole.keys())
        assert whole.metadata() == {"format": "pt"}
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / "many" / file, "numpy") as part:
                values = part.get_tensor(name)
            np.testing.assert_array_equal(values, whole.get_tensor(name))
            total += values.nbytes
    assert index["metadata"]["total_size"] == total


def test_writer_refuses_what_was_not_planned(tmp_path: Path) -> None:
    with Writer(tmp_path, [{"a": ("F32", (2, 3)), "b": ("I32", (1,))}], 1 << 30) as writer:
        with pytest.raises(AssertionError):
            writer.write("a", np.zeros((3, 2), np.float32))
        writer.write("a", np.ones((2, 3), np.float32))
        with pytest.raises(AssertionError):
            writer.close()
        with pytest.raises(AssertionError):
            writer.write("a", np.ones((2, 3), np.float32))


def test_nothing_is_written_over(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    quantise(model, output)
    before = (output / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="--force"):
        quantise(model, output, format="fp8")
    assert (output / "model.safetensors").read_bytes() == before
    quantise(model, output, format="fp8", force=True)
    assert json.loads((output / "config.json").read_text())["quantization_config"]["format"] == "float-quantized"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_force_replaces_checkpoints_only(model: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="no checkpoint"):
        quantise(model, tmp_path / "home", force=True)
    with pytest.raises(ConfigError, match="the model itself"):
        quantise(model, model, force=True)
    with pytest.raises(ConfigError, match="the model itself"):
        quantise(model, model.parent, force=True)
    with pytest.raises(ConfigError, match="a file"):
        quantise(model, tmp_path / "home" / "thesis.tex", force=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", 1, np.float32)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = np.nan
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj.*nan at row 5, column 7"):
        quantise(model, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


def test_a_half_written_folder_is_recognised(model: Path, tmp_path: Path) -> None:
    """A process that is killed leaves NAME.incomplete, which is no checkpoint and goes with the next run."""
    work = tmp_path / "out.incomplete"
    with folder.unfinished(tmp_path / "out", 0) as seen:
        assert seen == work
        assert (work / folder.MARKER).read_text() == str(os.getpid())
        with pytest.raises(ConfigError, match="is writing"):
            quantise(model, tmp_path / "out")
        with pytest.raises(CheckpointError):
            open_checkpoint(work)
    (tmp_path / "out").rmdir()
    work.mkdir()
    (work / folder.MARKER).write_text("4194999")  # above the largest pid
    (work / "model.safetensors").write_text("half")
    quantise(model, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_too_small_a_disk_is_told_before_work_begins(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(Layout, "quantize", None)
    with pytest.raises(ConfigError, match="1000 bytes free"):
        quantise(model, tmp_path / "out")


def test_quantising_twice_is_told(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantise(model, tmp_path / "first")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        quantise(tmp_path / "first", tmp_path / "second", format="int4")
    assert "quantised already (I8)" in caplog.text
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"


def test_ignored_modules_stay_and_are_listed(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "out", ignore=("*.layers.0.*", "*.layers.1.self_attn.k_proj"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    attention = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]  # engines join the three
    first = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    first += [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    assert config["quantization_config"]["ignore"] == sorted(["lm_head", *first, *attention])
    with open_checkpoint(model) as original, open_checkpoint(tmp_path / "out") as written:
        for module in (*first, *attention):
            np.testing.assert_array_equal(written.read(f"{module}.weight"), original.read(f"{module}.weight"))


def test_selection_of_other_families() -> None:
    """Routers, gates, convolutions, vision towers and fused experts are kept; experts' own matrices are not."""
    shapes = {
        "model.embed_tokens.weight": (9, 8),
        "lm_head.weight": (9, 8),
        "model.layers.0.mlp.gate.weight": (4, 8),
        "model.layers.0.mlp.shared_expert_gate.weight": (1, 8),
        "model.layers.0.mlp.experts.3.down_proj.weight": (8, 8),
        "model.layers.0.mlp.experts.gate_up_proj": (4, 8, 8),
        "model.layers.0.linear_attn.conv1d.weight": (8, 1, 4),
        "model.layers.0.linear_attn.in_proj_qkv.weight": (8, 8),
        "model.layers.0.linear_attn.in_proj_a.weight": (2, 8),
        "model.layers.0.linear_attn.A_log": (2,),
        "model.layers.0.self_attn.q_norm.weight": (8,),
        "model.layers.0.self_attn.qkv_proj.weight": (8, 8),
        "model.layers.0.self_attn.qkv_proj.bias": (8,),
        "model.visual.blocks.0.attn.qkv.weight": (8, 8),
    }

    headers = SimpleNamespace(tensors={name: TensorInfo(name, shape, "BF16", "f") for name, shape in shapes.items()})
    selection = select(headers, {})  # type: ignore[arg-type]
    assert {linear.module.removeprefix("model.layers.0.") for linear in selection.linears} == {
        "mlp.experts.3.down_proj",
        "linear_attn.in_proj_qkv",
        "self_attn.qkv_proj",
    }
    assert set(selection.kept) == {
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.linear_attn.conv1d",
        "model.layers.0.linear_attn.in_proj_a",
        "model.visual.blocks.0.attn.qkv",
    }


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(model), "--format", "nvfp4", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert "4.50 bits each" in told.out and "mean of 14" in told.out and told.err.startswith("quantising: ")
    assert main(arguments) == 1
    assert "--force" in capsys.readouterr().err
    assert main([*arguments[:2], "int3", *arguments[3:]]) == 1
    assert "int3" in capsys.readouterr().err
    assert main([str(model), "--format", "int4-awq", "--output", str(tmp_path / "b"), "--calibration", "none.txt"]) == 1
    assert "none.txt" in capsys.readouterr().err
