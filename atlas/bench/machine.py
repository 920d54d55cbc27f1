"""Where a result was measured: commit, machine, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

import atlas
from atlas.runtime import host


def describe() -> dict[str, Any]:
    """commit (None outside a git checkout; "+" when files differ from it), machine and versions."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": {
            "cpu": cpu_name(),
            "cores": host.allowed_cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": platform.platform(),
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {
            "atlas": atlas.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "tokenizers": importlib.metadata.version("tokenizers"),
        },
    }


def commit() -> str | None:
    """The commit of the checkout that Atlas runs from."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        found = _git(folder, "rev-parse", "HEAD")
        return found + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def cpu_name() -> str:
    """The model name of /proc/cpuinfo, or what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
