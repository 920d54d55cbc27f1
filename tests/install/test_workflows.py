"""The workflows of GitHub Actions: valid, pinned, and calling only what exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.install.harness import REPOSITORY, script

FOLDER = REPOSITORY / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def load(file: Path) -> dict[Any, Any]:
    document = yaml.safe_load(file.read_text())
    assert isinstance(document, dict)
    return document


def steps(document: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in document["jobs"].values() for step in job.get("steps", [])]


def test_they_are_there() -> None:
    assert [file.name for file in WORKFLOWS] == ["tests.yml", "wheel.yml", "wheels.yml"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_form(file: Path) -> None:
    document = load(file)
    assert document["name"] == file.stem
    assert document[True], "`on:`, which YAML 1.1 reads as true"
    assert document["permissions"] == {"contents": "read"}
    for name, job in document["jobs"].items():
        assert "uses" in job or ("runs-on" in job and job["steps"]), name
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(document["jobs"])


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_major_version(file: Path) -> None:
    for step in steps(load(file)):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step["uses"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_called_workflows_exist_and_get_what_they_ask_for(file: Path) -> None:
    for job in load(file)["jobs"].values():
        if "uses" in job:
            called = load(REPOSITORY / job["uses"])
            assert set(job["with"]) == set(called[True]["workflow_call"]["inputs"])


def commands(file: Path) -> list[list[str]]:
    """Every command of the workflow's scripts, split into words."""
    lines = []
    for step in steps(load(file)):
        text = step.get("run", "").replace("\\\n", " ")
        lines += [part for line in text.splitlines() for part in re.split(r"&&|>>|\$\(|\)", line)]
    return [words for line in lines if (words := shlex.split(line.replace('"', " ")))]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_scripts_and_options_exist(file: Path) -> None:
    for words in commands(file):
        for word in words:
            if word.startswith(".ci/") or word.endswith(".py"):
                assert (REPOSITORY / word).is_file(), word
        if "build_targets.py" in words:
            options = [word for word in words if word.startswith("--")]
            command = [sys.executable, "build_targets.py", "--help"]
            text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
            assert options and all(option in text for option in options)
        if "pytest" in words and "-m" in words:
            marker = words[words.index("-m") + 1]
            assert any(text.startswith(f"{marker}:") for text in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"])
        for extra in re.findall(r"\.\[(\w+)\]", " ".join(words)):
            assert extra in PYPROJECT["project"]["optional-dependencies"]


def test_the_matrix_has_what_the_wheels_need() -> None:
    command = [sys.executable, "build_targets.py", "--matrix"]
    output = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert output.count("\n") == 1, "$GITHUB_OUTPUT takes one line"
    entries = json.loads(output)["include"]
    job = load(FOLDER / "wheels.yml")["jobs"]["x86_64"]
    used = set(re.findall(r"matrix\.(\w+)", json.dumps(job["with"])))
    assert entries and all(used <= set(entry) for entry in entries)
    assert len({entry["tag"] for entry in entries}) == len(entries) <= 256
    for entry in entries:
        # PEP 427: a build tag starts with a digit and holds no hyphen.
        assert re.fullmatch(r"\d[a-z0-9_]*", entry["tag"]), entry


def test_readme_and_ci_use_the_same_test_command() -> None:
    runs = [step.get("run") for step in steps(load(FOLDER / "tests.yml"))]
    assert ".ci/run" in runs and "pip install '.[test]'" in runs and "pytest" in runs
    assert "pip install '.[test]' && pytest" in (REPOSITORY / "README.md").read_text()


def test_an_index_for_each_target(tmp_path: Path) -> None:
    index = script("index")
    names = [
        "atlas_infer-0.1.0-1_h200_llama_3_8b_bf16-cp311-cp311-manylinux_2_28_x86_64.whl",
        "atlas_infer-0.1.0-1_h200_llama_3_8b_bf16-cp312-cp312-manylinux_2_28_x86_64.whl",
        "atlas_infer-0.1.0-1_cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
    ]
    (tmp_path / "wheels").mkdir()
    for name in names:
        (tmp_path / "wheels" / name).write_bytes(name.encode())
    assert sorted(index.make(tmp_path / "wheels", tmp_path / "index")) == ["cpu", "h200_llama_3_8b_bf16"]
    folder = tmp_path / "index" / "h200_llama_3_8b_bf16" / "atlas-infer"
    page = (folder / "index.html").read_text()
    assert [f'href="{name}#sha256=' in page for name in names] == [True, True, False]
    assert (folder / names[1]).read_bytes() == names[1].encode()


def test_an_index_refuses_a_wheel_without_a_build_tag(tmp_path: Path) -> None:
    (tmp_path / "atlas_infer-0.1.0-cp311-cp311-linux_x86_64.whl").touch()
    with pytest.raises(ValueError, match="has no build tag"):
        script("index").make(tmp_path, tmp_path / "index")
