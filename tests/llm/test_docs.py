"""The examples of README, docs/offline.md and docs/structured-output.md run as they stand, against a server where they
name one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.real_server import RealServer

REPOSITORY = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RealServer]:
    with RealServer(tmp_path_factory.mktemp("docs"), smollm2_path).started() as running:
        yield running


@pytest.mark.parametrize(
    ("page", "count"), [("README.md", 2), ("docs/offline.md", 1), ("docs/structured-output.md", 2)]
)
def test_the_examples_run(page: str, count: int, server: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    assert len(examples) == count
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example.replace(URL, server.url), page, "exec"), names)
        assert "Paris" in capsys.readouterr().out
