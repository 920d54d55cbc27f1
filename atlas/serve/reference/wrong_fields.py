"""What is wrong with a body that is not of its type, in the words of docs/api.md: what was found, what is accepted."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from typing import Any

import msgspec

from atlas.serve.reference.tables import Json, say

_STEP = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[(?P<index>\d+|\.\.\.)\]")
_GOT = re.compile(r"Expected `.*`, got `(?P<type>\w+)`", re.DOTALL)
_NAMES = {"array": "a list", "str": "a string", "int": "an integer", "float": "a number", "bool": "true or false"}
_MOST_FOUND, _MOST_KEYS, _LONGEST_KEY = 60, 8, 64


def accepted(kind: type[msgspec.Struct], path: str) -> str:
    """What may stand at a path such as `messages[0].role`; empty where the type does not say."""
    flat = _at(kind, path)
    literals = [
        value for schema in flat for value in schema.get("enum", [schema["const"]] if "const" in schema else [])
    ]
    words = [_said(schema) for schema in flat if not {"enum", "const"} & schema.keys()]
    words += [msgspec.json.encode(value).decode() for value in literals]
    return " or ".join(dict.fromkeys(word for word in words if word not in ("null", "any value")))


def found(value: Any, path: str, what: str) -> str:
    """What stands there. what: the library's words, for a place that the path does not tell."""
    try:
        value = _value(value, path)
    except (LookupError, TypeError, ValueError):
        got = _GOT.fullmatch(what)
        return what if got is None else _NAMES.get(got["type"], got["type"])
    return shown(value)


def missing(kind: type[msgspec.Struct], value: Any, path: str, field: str) -> str:
    """That a field is missing from the object at `path`, and what there is of which it does not know."""
    known = {name for schema in _at(kind, path) for name in schema.get("properties", {})}
    try:
        unknown = (name for name in _value(value, path) if name not in known and len(name) <= _LONGEST_KEY)
        others = [*itertools.islice(unknown, _MOST_KEYS)]
    except (LookupError, TypeError, ValueError):
        return "missing"
    near = difflib.get_close_matches(field, others, n=1) or others
    return "missing" + (f", but there is {', '.join(map(repr, near))}" if near else "")


def _value(value: Any, path: str) -> Any:
    """Raises KeyError and the like for a place that is not told: `logit_bias[...]` is any value of an object."""
    for step in _STEP.finditer(path):
        index = step["index"]
        value = value[step["name"]] if index is None else value[int(index)]
    return value


def _at(kind: type[msgspec.Struct], path: str) -> list[Json]:
    """The types that may stand at a path."""
    components = _components(kind)
    here: list[Json] = [components[kind.__name__]]
    for step in _STEP.finditer(path):
        here = [inner for schema in _alternatives(components, here) for inner in _inside(schema, step)]
    return _alternatives(components, here)


def _inside(schema: Json, step: re.Match[str]) -> list[Json]:
    """What such a value holds at one step of a path."""
    if step["index"] == "...":
        inner = schema.get("additionalProperties")
    elif step["index"] is not None:
        inner = schema.get("items")
    else:
        inner = schema.get("properties", {}).get(step["name"], schema.get("additionalProperties"))
    return [inner] if isinstance(inner, dict) else []


def _alternatives(components: dict[str, Json], schemas: list[Json]) -> list[Json]:
    """The same without references and unions. What stands beside a union bounds each of its parts."""
    flat: list[Json] = []
    for schema in schemas:
        if "$ref" in schema:
            flat += _alternatives(components, [components[schema["$ref"].rsplit("/", 1)[1]]])
        elif "anyOf" in schema:
            beside = {name: value for name, value in schema.items() if name not in ("anyOf", "description")}
            flat += _alternatives(components, [{**part, **beside} for part in schema["anyOf"]])
        else:
            flat.append(schema)
    return flat


def _said(schema: Json) -> str:
    if schema.get("type") == "object" and (required := schema.get("required")):
        return f"object with {', '.join(required)}"
    bounds = ("minimum", "maximum") if schema.get("type") in ("integer", "number") else ("minItems",)
    return say({name: value for name, value in schema.items() if name in ("type", "items", *bounds)})


def shown(value: Any) -> str:
    """A value as an error quotes it."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    try:
        text = msgspec.json.encode(value[:_MOST_FOUND] if isinstance(value, str) else value).decode()
    except (msgspec.MsgspecError, UnicodeError, OverflowError):
        return "this value"
    return text if not isinstance(value, str) or len(value) <= _MOST_FOUND else f"{text[:-1]}..."


@functools.cache
def _components(kind: type[msgspec.Struct]) -> dict[str, Json]:
    _, components = msgspec.json.schema_components([kind])
    return dict(components)
