"""Arguments of formats that write every value as bare text: the tool's schema says what each of them is.

A value that is not of a type its schema names stays a string, exactly as the model wrote it: whether that is
acceptable is for the tool to say. Nothing is guessed for an argument without a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from atlas.parsers.json_object import parsed

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)(\.0+)?")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ANY = frozenset({"integer", "number", "boolean", "object", "array", "null"})
_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
_DEPTH = 16
"""Of references and alternatives that are followed: a schema may refer to itself."""


def json_text(value: str, name: str, parameters: Mapping[str, Any], *, any_type: bool = False) -> str:
    """The value of parameter `name` as JSON text.

    parameters: the JSON schema of the tool's parameters.  any_type: it is known not to be a string.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    types = types_of(schema, parameters)
    if any_type and not types - {"string"}:
        types = _ANY
    return _as_one_of(value, types) or json.dumps(value, ensure_ascii=False)


def _as_one_of(value: str, types: frozenset[str]) -> str | None:
    """The value as JSON text of one of the types but string, or None."""
    text = value.strip()
    lower = text.lower()
    if "null" in types and (lower == "null" or (text == "None" and "string" not in types)):
        return "null"
    if "boolean" in types and lower in ("true", "false"):
        return lower
    if ("integer" in types and _INTEGER.fullmatch(text)) or ("number" in types and _NUMBER.fullmatch(text)):
        return text
    opening = {"{": "object", "[": "array"}.get(text[:1])
    return parsed(text) if opening in types else None


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a part of the schema `root` allows, as far as it says."""
    return _types(schema, root, _DEPTH)


def _types(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_resolve(reference, root), root, depth - 1)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(item for item in named if isinstance(item, str))
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and parts:
            return frozenset().union(*(_types(part, root, depth - 1) for part in parts[:64]))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"]))
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if "properties" in schema or "additionalProperties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else frozenset()


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema, or what it refers to within `root`."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = _resolve(reference, root)
    return schema


def united(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema whose alternatives are few and simple as one without them: of types, or of values. Others are left."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return schema
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf", *_NOTES)}
    parts = schema.get("anyOf", schema.get("oneOf"))
    if rest or not isinstance(parts, list):
        return schema
    parts = [united(part, root) for part in parts[:64]]
    if not all(isinstance(part, Mapping) for part in parts):
        return schema
    bare = [{name: value for name, value in part.items() if name not in _NOTES} for part in parts]
    nothing, others = [part for part in bare if part == {"type": "null"}], [p for p in bare if p != {"type": "null"}]
    if len(others) == 1 and nothing:
        (other,) = others
        if "enum" in other or "const" in other:
            return {"enum": [*other.get("enum", [other.get("const")]), None]}
        types = other.get("type")
        if isinstance(types, str):
            return {**other, "type": [types, "null"]}
    if all(set(part) == {"type"} for part in bare):
        named = [part["type"] for part in bare]
        flat = [name for types in named for name in ([types] if isinstance(types, str) else types)]
        overlap = len({*flat}) < len(flat) or {"integer", "number"} <= {*flat}
        return schema if overlap and "oneOf" in schema else {"type": flat}
    return schema


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    """What a reference within the same schema points to."""
    if not reference.startswith("#/"):
        return None
    found: object = root
    for key in reference[2:].split("/"):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")
