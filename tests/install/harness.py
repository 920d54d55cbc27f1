"""A copy of the source tree, and environments to install it into."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

SOURCES = ("atlas", "csrc", "kernels", "pyproject.toml", "CMakeLists.txt", "build_targets.py", "README.md", "LICENSE")

NOT_COPIED = ("__pycache__", "*.so", ".*_cache")

LOOK = """
import json, sys
from atlas import _core, installed
manifest = json.loads(_core.embedded_manifest())
from atlas.targets.tree import kernels_root
print(json.dumps({
    "sets": [f"{s['hardware']}/{s['model']}/{s['quant']}" for s in manifest["sets"]],
    "record": json.loads(installed.path().read_text()),
    "targets": installed.targets(),
    "images": len(_core.embedded_images()),
    "extension": _core.__file__,
    "kernels": str(kernels_root()),
}))
"""
"""What an install holds. Needs no run-time dependency, so none is installed."""


def script(name: str) -> ModuleType:
    """A script of .ci/ as a module."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_tree(folder: Path) -> Path:
    """The source tree, without git and without anything built, in `folder`."""
    folder.mkdir(parents=True)
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(*NOT_COPIED))
        else:
            shutil.copy(source, folder / name)
    return folder


def run(command: Sequence[str | Path], cwd: Path, **variables: str) -> str:
    """Standard output of a command that must succeed, with no ATLAS_ variable but those given."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ATLAS_", "PYTHON", "SKBUILD", "VIRTUAL"))}
    # Warnings are errors in CI's own build, by a variable that is no part of an install path.
    environment.pop("SKBUILD_CMAKE_DEFINE", None)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @staticmethod
    def make(folder: Path, python: str = sys.executable) -> Environment:
        run([python, "-m", "venv", folder], folder.parent)
        return Environment(folder)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str | Path, cwd: Path, **variables: str) -> str:
        return run([self.python, "-m", "pip", *arguments], cwd, PIP_DISABLE_PIP_VERSION_CHECK="1", **variables)

    def holds(self) -> dict[str, Any]:
        """What the installed Atlas says it holds; run outside the source tree."""
        result: dict[str, Any] = json.loads(run([self.python, "-c", LOOK], self.folder))
        return result
