"""Rebuilds an editable install after a kernel edit: `python build_targets.py --build`.

Kernel sets are embedded in the extension, so new ones need a new extension; installing again is the one way to make
it, and cheap: kernels that did not change come from the cache, objects from the build folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlparse

from atlas import installed
from atlas.build.toolchain import CUDA_REQUIREMENTS
from atlas.errors import BuildError
from atlas.targets.target import VARIABLES, select

BUILD_REQUIREMENTS = ("scikit-build-core", "pybind11")
"""The build system's own requirements, as in pyproject.toml."""

_DISTRIBUTION = "atlas-infer"


def editable_root(distribution: str = _DISTRIBUTION) -> Path | None:
    """The checkout that this Python's install of Atlas is an editable install of; None if it is none."""
    try:
        text = importlib.metadata.distribution(distribution).read_text("direct_url.json")
        document = json.loads(text or "{}")
        if not document.get("dir_info", {}).get("editable"):
            return None
        return Path(unquote(urlparse(document["url"]).path))
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        return None


def recorded_selection() -> dict[str, str]:
    """The ATLAS_TARGET_* variables that this install was built with."""
    file = installed.path()
    try:
        selection = json.loads(file.read_text())["selection"] if file else {}
        return {name: str(selection[name]) for name in VARIABLES if selection.get(name)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # a damaged record: the variables of the environment decide


def command(
    root: Path, environment: Mapping[str, str], editable: Path | None, recorded: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that rebuilds the editable install of the checkout `root`, and its environment.

    Targets are those of the environment's variables; if none is set, those that the install was built with.

    Raises:
        BuildError: no editable install of `root` here, nothing to install with, or an impossible selection.
    """
    if editable is None or editable.resolve() != root.resolve():
        found = f"an editable install of {editable}" if editable else "no editable install"
        raise BuildError(
            "--build",
            f"{sys.executable} has {found}",
            f"an editable install of {root}, or a folder to write kernel sets to",
            "run `pip install -e .` first, or `python build_targets.py --build FOLDER`",
        )
    variables = {name: environment[name] for name in VARIABLES if environment.get(name)} or dict(recorded)
    selection = select(root / "kernels", variables)
    needed = [*BUILD_REQUIREMENTS, *(CUDA_REQUIREMENTS if selection.needs_cuda() else ())]
    if importlib.util.find_spec("pip"):
        install = [sys.executable, "-m", "pip", "install"]
    elif uv := shutil.which("uv"):
        install = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise BuildError("--build", "neither pip nor uv is here to install with", "", "run `python -m ensurepip`")
    # An isolated build would fetch the compilers again, and its folders are new each time: nothing would be reused.
    isolation = ["--no-build-isolation"] if all(map(_is_installed, _names(needed))) else []
    return [*install, "--no-deps", *isolation, "-e", str(root)], {**environment, **variables}


def _names(requirements: Iterable[str]) -> list[str]:
    return [re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0] for requirement in requirements]


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
