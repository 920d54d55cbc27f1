"""The OpenAPI document in words, for people: what the page at /docs shows, and the tables of docs/api.md.

`python -m atlas.serve.reference docs/api.md` writes the tables anew, between `<!-- fields of NAME -->` and
`<!-- end -->`; `<!-- fields of NAME but OTHER -->` leaves out those that OTHER has too, and `<!-- endpoints -->` begins
the table of the endpoints.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

Json = dict[str, Any]

_BLOCK = re.compile(
    r"(?P<begin><!-- (?:fields of (?P<name>\w+)(?: but (?P<other>\w+))?|endpoints) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


_PLURALS = {"integer": "integers", "number": "numbers", "string": "strings", "object": "objects"}


class Field(msgspec.Struct, frozen=True):
    """A field of an object."""

    name: str
    type: str
    required: bool
    description: str


def fields(components: Json, name: str) -> list[Field]:
    """The fields of the object of a name, those that must be there first."""
    component = components[name]
    required = component.get("required", [])
    found = [
        Field(field, say(schema), field in required, schema.get("description") or _of_object(components, schema))
        for field, schema in component.get("properties", {}).items()
    ]
    return sorted(found, key=lambda field: not field.required)


def _of_object(components: Json, schema: Json) -> str:
    """What is said of the only thing that a field can hold, for a field of which nothing is said."""
    parts = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    if len(parts) != 1:
        return ""
    described = components[_type(parts[0])] if "$ref" in parts[0] else parts[0]
    return str(described.get("description", "")).partition("\n\n")[0]


def say(schema: Json) -> str:
    """A schema as a few words: `integer from 1 to 128`, `list of ChatMessage, at least 1`. Null is not mentioned."""
    text = _type(schema)
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None or high is not None:
        text += _range(low, high)
    if (least := schema.get("minItems")) and "list" in text:
        text += f", at least {least}"
    return text


def _type(schema: Json) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    if "anyOf" in schema:
        words = [_type({**part, **_items(schema)}) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(words))
    if "enum" in schema:
        return " or ".join(_literal(value) for value in schema["enum"] if value is not None) or "null"
    if "const" in schema:
        return _literal(schema["const"])
    kind = schema.get("type", "any value")
    if kind == "array":
        items = schema.get("items")
        return "list" if not items else f"list of {_PLURALS.get(word := _type(items), word)}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {say(values)}" if isinstance(values, dict) and values else "object"
    return str(kind)


def _items(schema: Json) -> Json:
    """What stands beside an `anyOf` and is about the alternatives that are lists or objects."""
    return {name: schema[name] for name in ("items", "additionalProperties") if name in schema}


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return f" to {high:g}"
    if high is None:
        return f" from {low:g}"
    return " of 64 bits" if high == 2**63 - 1 else f" from {low:g} to {high:g}"


def _literal(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def with_tables(text: str, document: Json) -> str:
    """A Markdown page with its tables made anew. Raises KeyError for a name that the document does not have."""
    components = document["components"]["schemas"]

    def table(match: re.Match[str]) -> str:
        made = _endpoints(document) if match["name"] is None else _fields(components, match["name"], match["other"])
        return f"{match['begin']}{made}{match['end']}"

    return _BLOCK.sub(table, text)


def _fields(components: Json, name: str, other: str | None) -> str:
    rows = ["| field | type | |", "| --- | --- | --- |"]
    known = fields(components, other) if other else []
    for field in [field for field in fields(components, name) if field not in known]:
        name = f"`{field.name}`" + (" (required)" if field.required else "")
        rows.append(f"| {name} | {_cell(field.type)} | {_cell(field.description)} |")
    return "\n".join(rows) + "\n"


def _endpoints(document: Json) -> str:
    rows = ["| endpoint | |", "| --- | --- |"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            rows.append(f"| `{method.upper()} {path}` | {_cell(operation['summary'])} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
