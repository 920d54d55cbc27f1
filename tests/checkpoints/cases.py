"""A folder of checkpoints with known answers: `valid/`, `invalid/`, `script/` and `expected.json`.

The environment variable ATLAS_CHECKPOINTS names it; docs/testing.md says what it must hold.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "ATLAS_CHECKPOINTS"


def folder() -> Path | None:
    value = os.environ.get(VARIABLE)
    return Path(value) if value else None


@cache
def expected() -> dict[str, Any]:
    root = folder()
    return {} if root is None else dict(json.loads((root / "expected.json").read_text(encoding="utf-8")))


def params(kind: str) -> list[Any]:
    """A pytest parameter per checkpoint of a kind; one that skips with the reason where there is no folder."""
    root = folder()
    if root is None:
        return [pytest.param("", marks=pytest.mark.skip(reason=f"{VARIABLE} is not set"), id="none")]
    return sorted(path.name for path in (root / kind).iterdir())


def path(kind: str, name: str) -> Path:
    root = folder()
    assert root is not None
    return root / kind / name
