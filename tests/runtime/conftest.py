"""Fixtures of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime import fake_cuda


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the fake libcuda.so.1."""
    return fake_cuda.build(tmp_path_factory.mktemp("fake_driver"))
