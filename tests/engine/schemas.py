"""JSON Schemas of every kind that an answer may be asked to follow."""

from __future__ import annotations

from typing import Any

NODE = {
    "type": "object",
    "properties": {"value": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object of these properties and no others, all of them required unless it is said which."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 12}

SCHEMAS: dict[str, Any] = {
    "flat": closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 130}),
    "nested": closed(a=closed(b=closed(c=closed(d={"type": "boolean"})))),
    "array with bounds": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "array of objects": {"type": "array", "items": closed(x={"type": "boolean"}, y={"type": "null"}), "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, WORD, {"type": "null"}],
        "items": False,
        "minItems": 3,
    },
    "enum": {"enum": ["red", "green", 3, None, {"deep": [1, 2]}, "ünï ☃"]},
    "const": closed(kind={"const": "circle"}, sides={"const": 0}),
    "anyOf": {"anyOf": [closed(cat={"type": "boolean"}), closed(dog=WORD), {"type": "null"}]},
    "oneOf of distinct types": {"oneOf": [{"type": "boolean"}, WORD, {"type": "array", "maxItems": 0}]},
    "allOf": {"allOf": [{"type": "string", "minLength": 3}, {"maxLength": 6}]},
    "$ref and $defs": {"$defs": {"point": closed(x={"type": "boolean"})}, **closed(p={"$ref": "#/$defs/point"})},
    "recursion": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "integer range": {"type": "integer", "minimum": -37, "maximum": 1234},
    "open number range": closed(p={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, q=WORD),
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "formats": closed(
        day={"type": "string", "format": "date"},
        at={"type": "string", "format": "date-time"},
        id={"type": "string", "format": "uuid"},
        ip={"type": "string", "format": "ipv4"},
    ),
    "email": {"type": "string", "format": "email", "maxLength": 20},
    "optional properties": closed(["b"], **{name: {"type": "null"} for name in "abcd"}),
    "unicode keys": closed(**{"naïve": {"type": "boolean"}, "键": {"type": "null"}, 'a"b\\c': {"type": "null"}}),
    "additionalProperties": {
        "type": "object",
        "properties": {"id": {"type": "boolean"}},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,3}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "types in a list": {"type": ["string", "null", "boolean"], "maxLength": 5},
    "few words": {"type": "array", "items": {"type": "array", "maxItems": 2, "items": WORD}, "maxItems": 2},
}
