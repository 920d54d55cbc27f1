"""Forced calls in Gemma's notation: values between quote words, and without quotes around keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from atlas.parsers.grammar_rules import COUNTED, Rules, Schema, Special, arguments_schema, properties_of, repeated
from atlas.parsers.schema_types import resolved, types_of

_MOST_DEPTH = 8
"""Levels of a schema that are followed; below them any value may stand."""

_MOST_VALUES = 5_000
"""Parts of schemas that are followed: one that refers to itself in several places would go on doubling."""

_BARE_KEY = re.compile(r"[\w.$/-]+")
_PLAIN_TYPES = ("integer", "number", "boolean", "null")


def gemma_calls(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    begin, quote, end = gemma_words(rules.special)
    notation = _Notation(rules, quote)
    options = []
    for name, schema in schemas.items():
        rules.tool(name)
        head, arguments = rules.word(f"{begin}call:{name}"), arguments_schema(_merged(schema, schema))
        options.append(f"{head} {notation.object(arguments, schema, 0)} {rules.word(end)}")
    return repeated(rules.rule(" | ".join(options)), "", one)


def gemma_words(special: Special) -> tuple[str, str, str]:
    """What opens a call, stands around strings, and closes a call, in the notation of a tokenizer's model."""
    if "<start_function_call>" in special:
        return "<start_function_call>", "<escape>", "<end_function_call>"
    return "<|tool_call>", '<|"|>', "<tool_call|>"


class _Notation:
    """Values between quote words and without quotes around keys."""

    def __init__(self, rules: Rules, quote: str) -> None:
        self._rules, self._quote = rules, quote
        self._any = ""
        self._left = _MOST_VALUES

    def value(self, part: Any, root: Schema, depth: int) -> str:
        part = resolved(part, root)
        self._left -= 1
        if not isinstance(part, Mapping) or depth > _MOST_DEPTH or self._left < 0:
            if part is not None:
                self._rules.hold({"$ref": part}, "$ref")  # what does not end, as nothing else gets so deep
            return self.any()
        self._rules.hold(part, "oneOf", "not", "if")
        part = _merged(part, root)
        enum = part.get("enum", [part["const"]] if "const" in part else None)
        if isinstance(enum, list) and enum:
            return self._rules.choice([self._rules.word(self._literal(item)) for item in enum])
        for key in ("anyOf", "oneOf"):
            if isinstance(parts := part.get(key), list) and parts:
                rest = {name: value for name, value in part.items() if name != key}
                return self._rules.choice(
                    [self._rules.rule(self.value({"allOf": [rest, option]}, root, depth + 1)) for option in parts]
                )
        types = types_of(part, root)
        options = [self.string(part)] if not types or "string" in types else []
        if plain := [name for name in _PLAIN_TYPES if name in types]:
            options.append(self._rules.json({**part, "type": plain}, root))
        if "object" in types:
            options.append(self.object(part, root, depth))
        if "array" in types:
            options.append(self._list(part, root, depth))
        return self._rules.choice(options)

    def string(self, part: Schema | None = None) -> str:
        self._rules.hold_format(part)
        return f"{self._rules.word(self._quote)} {self._rules.until(self._quote, part=part)}"

    def object(self, part: Schema, root: Schema, depth: int) -> str:
        self._rules.hold(part, *COUNTED, "patternProperties")
        properties = properties_of(part)
        if not properties and isinstance(part.get("additionalProperties"), Mapping):
            self._rules.hold(part, "additionalProperties")
        if not properties:
            return '"{}"' if part.get("additionalProperties") is False else self._free("{", "}")
        required = _required(part)
        members = [
            (self._rules.rule(f"{self._key(name)} {self.value(inner, root, depth + 1)}"), name in required)
            for name, inner in properties.items()
        ]
        # In the schema's order, commas between those that are there.
        tails = [""]
        for rule, needed in reversed(members):
            tails.append(self._rules.rule(f'"," {rule} {tails[-1]}' if needed else f'("," {rule})? {tails[-1]}'))
        tails = tails[::-1][1:]
        options = []
        for (rule, needed), tail in zip(members, tails, strict=True):
            options.append(f"{rule} {tail}")
            if needed:
                break
        else:
            options.append('""')
        return f'"{{" {self._rules.choice(options)} "}}"'

    def _list(self, part: Schema, root: Schema, depth: int) -> str:
        least, most = (value if _is_count(value := part.get(name)) else None for name in ("minItems", "maxItems"))
        first = part.get("prefixItems")
        self._rules.hold(part, "uniqueItems", "contains")
        if isinstance(first, list) and (least or 0) > len(first):
            self._rules.hold(part, "minItems")
        items = [
            self._rules.rule(self.value(one, root, depth + 1)) for one in (first if isinstance(first, list) else ())
        ]
        if most == 0:
            return '"[]"'
        if items:
            # As many as are named, and no more: which of them may be missing says `minItems`.
            count = len(items) if least is None else max(1, min(least, len(items)))
            options = [' "," '.join(items[:number]) for number in range(count, min(len(items), most or len(items)) + 1)]
            return f'"[" {self._rules.choice(options or [items[0]])} "]"'
        item = self._rules.rule(self.value(part.get("items"), root, depth + 1))
        more = f"{{{max((least or 0) - 1, 0)},{'' if most is None else max(most, least or 0) - 1}}}"
        several = f'{item} ("," {item}){more}'
        return f'"[" {several} "]"' if least else f'"[" ({several})? "]"'

    def any(self) -> str:
        if not self._any:
            self._any = self._rules.new_name()
            plain = self._rules.json({"type": list(_PLAIN_TYPES)})
            options = [self.string(), plain, self._free("{", "}"), self._free("[", "]")]
            self._rules.rule(" | ".join(options), name=self._any)
        return self._any

    def _free(self, begin: str, end: str) -> str:
        """An object or a list of anything."""
        item = self.any()
        if begin == "{":
            key = self._rules.rule('/[A-Za-z_][A-Za-z0-9_]{0,63}/ ":"')
            item = f"{key} {item}"
        return f'"{begin}" ({item} ("," {item})*)? "{end}"'

    def _key(self, name: str) -> str:
        return self._rules.word(f"{self._name(name)}:")

    def _literal(self, item: Any) -> str:
        if isinstance(item, str):
            return f"{self._quote}{item}{self._quote}"
        if isinstance(item, list):
            return f"[{','.join(map(self._literal, item))}]"
        if isinstance(item, dict):
            return f"{{{','.join(f'{self._name(key)}:{self._literal(value)}' for key, value in item.items())}}}"
        return json.dumps(item)

    def _name(self, name: str) -> str:
        return name if _BARE_KEY.fullmatch(name) else f"{self._quote}{name}{self._quote}"


def _merged(part: Schema, root: Schema) -> Schema:
    """A schema with its `allOf` in it, as far as one schema can say what several do."""
    parts = part.get("allOf")
    if not isinstance(parts, list):
        return part
    result = {name: value for name, value in part.items() if name != "allOf"}
    for one in parts:
        one = resolved(one, root)
        one = _merged(one, root) if isinstance(one, Mapping) else {}
        result |= {
            **one,
            "properties": {**properties_of(result), **properties_of(one)},
            "required": [*_required(result), *_required(one)],
        }
    for name in ("properties", "required"):
        if not result.get(name):
            result.pop(name, None)
    return result


def _required(schema: Schema) -> list[Any]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10_000
