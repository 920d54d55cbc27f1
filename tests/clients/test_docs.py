"""The example of docs/tools.md runs as it stands, but for the port, on the template that the page names."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"


def test_the_example_of_tools(client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    address = "http://127.0.0.1:8000/v1"
    assert example.count(address) == 1
    exec(compile(example.replace(address, str(client.base_url)), PAGE.name, "exec"), {})
    assert capsys.readouterr().out == 'get_weather {"city": "Paris"}\n'
