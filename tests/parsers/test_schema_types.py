"""What a bare value becomes by the schema of its parameter."""

from __future__ import annotations

from typing import Any

import pytest

from atlas.parsers.schema_types import json_text

REFERENCE = {"$ref": "#/$defs/N"}


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("5", {"type": "integer"}, "5"),
        ("-5", {"type": "integer"}, "-5"),
        ("5.0", {"type": "integer"}, "5.0"),
        ("5.5", {"type": "integer"}, '"5.5"'),
        ("05", {"type": "integer"}, '"05"'),
        ("five", {"type": "integer"}, '"five"'),
        ("1e3", {"type": "number"}, "1e3"),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("12345678901234567890123", {"type": "integer"}, "12345678901234567890123"),
        ("True", {"type": "boolean"}, "true"),
        ("yes", {"type": "boolean"}, '"yes"'),
        ("None", {"type": "null"}, "null"),
        ('{"a": [1]}', {"type": "object"}, '{"a": [1]}'),
        ("[1,\n 2]", {"type": "array"}, "[1,\n 2]"),
        ('["a\nb"]', {"type": "array"}, '["a\\nb"]'),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("{'a': 1}", {"type": "object"}, "\"{'a': 1}\""),
        ("[" * 100_000, {"type": "array"}, '"' + "[" * 100_000 + '"'),
        ("5", {"type": "string"}, '"5"'),
        ("null", {"type": "string"}, '"null"'),
        ("5", {}, '"5"'),
        ("5", True, '"5"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("None", {"type": ["string", "null"]}, '"None"'),
        ("x", {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"x"'),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3"),
        ("3", {"oneOf": [{"type": "boolean"}, REFERENCE]}, "3"),
        ("3", REFERENCE, "3"),
        ("3", {"$ref": "#/$defs/Self"}, '"3"'),
        ("3", {"$ref": "https://example.com/x"}, '"3"'),
        ("2", {"enum": [1, 2]}, "2"),
        ("2", {"enum": ["1", "2"]}, '"2"'),
        ("2", {"const": 2}, "2"),
        ("{}", {"properties": {}}, "{}"),
        ("[]", {"items": {}}, "[]"),
    ],
)
def test_value(value: str, schema: Any, expected: str) -> None:
    parameters = {
        "properties": {"p": schema},
        "$defs": {"N": {"type": "integer"}, "Self": {"$ref": "#/$defs/Self"}},
    }
    assert json_text(value, "p", parameters) == expected


@pytest.mark.parametrize("parameters", [{}, {"properties": None}, {"properties": {}}, {"properties": {"p": None}}])
def test_without_a_schema_a_value_is_a_string(parameters: dict[str, Any]) -> None:
    assert json_text("1", "p", parameters) == '"1"'
    assert json_text("1", "p", parameters, any_type=True) == "1"
    assert json_text("x", "p", parameters, any_type=True) == '"x"'
