"""The examples of README and docs/offline.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/offline.md"])
def test_the_example_runs(page: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    exec(compile(example, page, "exec"), {})
    assert "Paris" in capsys.readouterr().out
