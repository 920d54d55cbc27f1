"""Twenty JSON schemas of many kinds, each of which bounds what is written, so that a small model comes to an end."""

from __future__ import annotations

from typing import Any

WORD: Any = {"type": "string", "pattern": "^[A-Za-z ]{1,12}$"}


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": _object(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "boolean and null": _object(ok={"type": "boolean"}, nothing={"type": "null"}),
    "enum": _object(colour={"enum": ["red", "green", "blue"]}, size={"type": "string", "enum": ["S", "M", "L"]}),
    "const": _object(
        kind={"const": "circle"}, version={"const": 3}, radius={"type": "integer", "minimum": 1, "maximum": 9}
    ),
    "nested": _object(
        person=_object(name=WORD, address=_object(city=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"}))
    ),
    "array of numbers": _object(
        xs={"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 2, "maxItems": 3}
    ),
    "array of objects": _object(
        items={
            "type": "array",
            "items": _object(id={"type": "integer", "minimum": 1, "maximum": 99}),
            "minItems": 1,
            "maxItems": 2,
        }
    ),
    "optional members": _object(
        ["a"], a=WORD, b={"type": "boolean"}, c={"type": "integer", "minimum": 0, "maximum": 9}
    ),
    "nullable by type": _object(
        name={**WORD, "type": ["string", "null"]}, n={"type": ["integer", "null"], "minimum": 0, "maximum": 5}
    ),
    "anyOf": _object(value={"anyOf": [{"type": "boolean"}, WORD]}),
    "anyOf of objects": {
        "anyOf": [
            _object(type={"const": "cat"}, lives={"type": "integer", "minimum": 1, "maximum": 9}),
            _object(type={"const": "dog"}, good={"type": "boolean"}),
        ]
    },
    "references": {
        "$defs": {
            "point": _object(
                x={"type": "integer", "minimum": 0, "maximum": 9}, y={"type": "integer", "minimum": 0, "maximum": 9}
            )
        },
        **_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "recursive": {
        "$defs": {
            "node": _object(
                ["v"],
                v={"type": "integer", "minimum": 0, "maximum": 9},
                child={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
            ),
            "leaf": _object(v={"type": "integer", "minimum": 0, "maximum": 9}),
        },
        "$ref": "#/$defs/node",
    },
    "pattern": _object(id={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}),
    "lengths": _object(code={"type": "string", "minLength": 3, "maxLength": 8}),
    "number": _object(price={"type": "number", "minimum": 0, "maximum": 100, "multipleOf": 0.5}),
    "tuple": _object(
        pair={"type": "array", "prefixItems": [WORD, {"type": "boolean"}], "items": False, "minItems": 2, "maxItems": 2}
    ),
    "date": _object(day={"type": "string", "format": "date"}),
    "top-level array": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 4},
    "hard strings": _object(**{'quo"te': {"const": "back\\slash"}, "ä 😀": {"enum": ["é\n", "\t"]}}),
}
