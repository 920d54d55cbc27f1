"""docs/api.md says what the server does: all endpoints, all fields, all codes of errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atlas.serve.reference.endpoint import Endpoint
from atlas.serve.reference.openapi import document
from atlas.serve.reference.tables import fields, with_tables
from atlas.serve.routes import ENDPOINTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
DOCUMENT = document(ENDPOINTS)
COMPONENTS = DOCUMENT["components"]["schemas"]
BODIES = [endpoint for endpoint in ENDPOINTS if endpoint.body is not None]
LIKE_OTHERS = {"Conversation": "MessagesRequest"}
"""Bodies without a table of their own: all their fields are in that of the other."""


def test_the_tables_are_the_structs() -> None:
    made = with_tables(PAGE, DOCUMENT)
    assert made == PAGE, "run `python -m atlas.serve.reference docs/api.md`"
    assert with_tables(PAGE.replace("| `temperature` |", "| `temprature` |"), DOCUMENT) == PAGE


@pytest.mark.parametrize("endpoint", BODIES, ids=lambda endpoint: endpoint.path)
def test_every_field_of_every_body_is_there(endpoint: Endpoint) -> None:
    name = endpoint.body.__name__
    shown = LIKE_OTHERS.get(name, name)
    assert re.search(rf"<!-- fields of {shown}( but \w+)? -->", PAGE)
    # The struct itself is asked, not the document that the tables are made from.
    names = {field.encode_name for field in fields_of(endpoint)} | set(endpoint.refused)
    assert names == {field.name for field in fields(COMPONENTS, name)}
    for field in names:
        assert f"| `{field}`" in PAGE, field


def fields_of(endpoint: Endpoint) -> list[Any]:
    return list(msgspec.structs.fields(endpoint.body))


@pytest.mark.parametrize("endpoint", BODIES, ids=lambda endpoint: endpoint.path)
def test_every_field_says_what_it_is(endpoint: Endpoint) -> None:
    silent = [field.name for field in fields(COMPONENTS, endpoint.body.__name__) if not field.description]
    assert not silent


def test_every_code_of_an_error_is_there() -> None:
    patterns = (
        r"ApiError\(\s*\d{3},\s*\"(\w+)\"",
        r"(?:unavailable|too_many)\(\s*\"(\w+)\"",
        r"\bcode(?:: str)? ?= ?\"(\w+)\"",
    )
    for path in (ROOT / "atlas" / "serve").rglob("*.py"):
        for pattern in patterns:
            for code in re.findall(pattern, path.read_text(encoding="utf-8")):
                assert f"`{code}`" in PAGE, f"{path.name}: {code}"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert target.startswith("http") or (ROOT / "docs" / target).exists(), target
