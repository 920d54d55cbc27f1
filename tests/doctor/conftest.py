"""Fixtures of the doctor's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "atlas"
    (folder / "models").mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "models").chmod(0o700)
    return folder
