"""The record of what an install was built for, and the commands that tell it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atlas import __version__, cli, installed
from atlas.errors import AtlasError

CPU = ("cpu/*/f32", "cpu/*/bf16", "cpu/*/int8", "cpu/*/int4")


def write_record(folder: Path, *names: str) -> Path:
    """A `_targets.json` with targets of these names."""
    keys = ("hardware", "model", "quant")
    file = folder / "_targets.json"
    file.write_text(json.dumps({"targets": [dict(zip(keys, name.split("/"), strict=True)) for name in names]}))
    return file


@pytest.fixture
def holding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An install with the CPU's targets and one for an H200."""
    file = write_record(tmp_path, *CPU, "h200/smollm2-135m/bf16")
    monkeypatch.setattr(installed, "path", lambda: file)
    return file


def test_this_install_names_its_targets() -> None:
    assert set(CPU) <= set(installed.targets() or [])
    file = installed.path()
    assert file is not None
    record = json.loads(file.read_text())
    assert (record["version"], set(record["selection"])) == (__version__, set(installed.VARIABLES))


def test_the_record_of_a_manifest(tmp_path: Path) -> None:
    kernel_set = {
        "hardware": "h200",
        "kind": "cuda",
        "model": "m",
        "quant": "bf16",
        "arch": "sm_90a",
        "shape_hash": "abc",
        "kernels": [],
        "compute_capability": [9, 0],
    }
    manifest = {"core_abi": 7, "compiler": "c", "selection": {"ATLAS_TARGET_HW": "h200"}, "sets": [kernel_set]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    installed.main([str(tmp_path / "manifest.json"), str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["selection"] == {"ATLAS_TARGET_HW": "h200", "ATLAS_TARGET_MODEL": "", "ATLAS_TARGET_QUANT": ""}
    assert [target["arch"] for target in record["targets"]] == ["sm_90a"]
    assert "kernels" not in record["targets"][0] and record["core_abi"] == 7


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"ATLAS_TARGET_HW": ""},
        {"ATLAS_TARGET_HW": "h200", "ATLAS_TARGET_MODEL": "smollm2-135m", "ATLAS_TARGET_QUANT": "bf16"},
        {"ATLAS_TARGET_MODEL": "smollm2-135m", "ATLAS_TARGET_QUANT": "bf16"},
    ],
)
def test_variables_that_agree(holding: Path, environment: dict[str, str]) -> None:
    assert installed.difference(environment) is None


def test_variables_that_ask_for_more(holding: Path) -> None:
    error = installed.difference({"ATLAS_TARGET_HW": "gb10", "ATLAS_TARGET_MODEL": "smollm2-135m"})
    assert error is not None and error.where == "ATLAS_TARGET_HW=gb10 ATLAS_TARGET_MODEL=smollm2-135m"
    assert "gb10/smollm2-135m/bf16" in error.found and "this install lacks" in error.found
    assert "h200/smollm2-135m/bf16" in error.accepted and "--no-cache-dir" in error.fix


def test_variables_that_ask_for_less(holding: Path) -> None:
    error = installed.difference({"ATLAS_TARGET_HW": "cpu"})
    assert error is not None
    assert error.found == "does not select h200/smollm2-135m/bf16, which this install has"


def test_variables_that_name_nothing(holding: Path) -> None:
    error = installed.difference({"ATLAS_TARGET_HW": "h20"})
    assert error is not None and "unknown name 'h20'" in str(error)


def test_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "path", lambda: None)
    assert installed.targets() is None
    assert "pip install ." in str(installed.difference({"ATLAS_TARGET_HW": "cpu"}))
    assert "not built" in cli.version()


def test_a_damaged_record(holding: Path) -> None:
    holding.write_text("{}")
    with pytest.raises(AtlasError, match="cannot be read .*; reinstall Atlas"):
        installed.targets()
    assert "cannot be read" in cli.version()
    assert "cannot be read" in str(installed.difference({"ATLAS_TARGET_HW": "cpu"}))


def test_serve_says_that_variables_differ(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atlas.serve", str(tmp_path / "nothing.gguf"), "--port", "0", "--offline"]
    environment = {**os.environ, "ATLAS_TARGET_HW": "h2000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "WARNING atlas.serve: ATLAS_TARGET_HW: unknown name 'h2000'" in done.stderr


# ---- the atlas command ---------------------------------------------------------------------------


def atlas(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atlas", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_version(holding: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"atlas {__version__} ({', '.join(CPU)}, h200/smollm2-135m/bf16)\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_is_there(command: str) -> None:
    done = atlas(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"python -m atlas.{command}" in done.stdout


def test_help_lists_the_commands() -> None:
    done = atlas("--help")
    assert done.returncode == 0
    assert all(text in done.stdout for text in cli.COMMANDS.values())
    assert (atlas().returncode, atlas().stdout) == (2, "")


def test_unknown_command() -> None:
    done = atlas("doctr")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("did you mean doctor?")


def test_a_command_keeps_its_exit_code() -> None:
    done = atlas("doctor", "no-such-model", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["problems"] >= 1
    assert any(check["check"] == "model" and check["status"] == "problem" for check in report["checks"])
