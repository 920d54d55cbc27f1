"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas.weights.fetch import resolve_model


def pytest_addoption(parser: pytest.Parser) -> None:
    backends = ("cpu", "cuda", "reference", "collect")
    parser.addoption("--contract-backend", choices=backends, default="cpu", help="backend of tests/contract")
    parser.addoption("--contract-keys", help="file for the kernels that tests/contract asked for, one JSON a line")
    parser.addoption(
        "--contract-report", help="file for a JSON summary of tests/contract: cases and worst error per op"
    )
    parser.addoption("--model-backend", choices=("cpu", "cuda"), default="cpu", help="backend of tests/models")
    parser.addoption("--pack", help="folder written by `python -m tests.contract.pack`, for the cuda backend")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "exhaustive" in str(config.getoption("markexpr")):
        return
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.skip(reason="seconds to minutes: run `pytest -m exhaustive`"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model, SmolLM2-135M-Instruct as GGUF; fetched into the user's cache when it is not there."""
    return resolve_model("smollm2-135m", offline=False)


@pytest.fixture(scope="session")
def model_backend(request: pytest.FixtureRequest) -> str:
    """The backend that tests of whole models run on."""
    return str(request.config.getoption("--model-backend"))
