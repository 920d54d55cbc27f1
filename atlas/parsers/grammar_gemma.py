"""Forced calls in Gemma's notation: values between quote words, and without quotes around keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from atlas.parsers.grammar_rules import Rules, Schema, arguments_schema, properties_of, repeated
from atlas.parsers.schema_types import resolved, types_of

_MOST_DEPTH = 8
"""Levels of a schema that are followed; below them any value may stand."""

_BARE_KEY = re.compile(r"[\w.$/-]+")
_PLAIN_TYPES = ("integer", "number", "boolean", "null")


def gemma_calls(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    older = "<start_function_call>" in rules.special
    begin, quote, end = (
        ("<start_function_call>", "<escape>", "<end_function_call>")
        if older
        else ("<|tool_call>", '<|"|>', "<tool_call|>")
    )
    notation = _Notation(rules, quote)
    options = []
    for name, schema in schemas.items():
        head = rules.word(f"{begin}call:{name}")
        options.append(f"{head} {notation.object(arguments_schema(schema), schema, 0)} {rules.word(end)}")
    return repeated(rules.rule(" | ".join(options)), "", one)


class _Notation:
    """Values between quote words and without quotes around keys."""

    def __init__(self, rules: Rules, quote: str) -> None:
        self._rules, self._quote = rules, quote
        self._any = ""

    def value(self, part: Any, root: Schema, depth: int) -> str:
        part = resolved(part, root)
        if not isinstance(part, Mapping) or depth > _MOST_DEPTH:
            return self.any()
        enum = part.get("enum", [part["const"]] if "const" in part else None)
        if isinstance(enum, list) and enum and all(isinstance(item, str | int | float | None) for item in enum):
            return self._rules.choice([self._literal(item) for item in enum])
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
        return f"{self._rules.word(self._quote)} {self._rules.until(self._quote, part=part)}"

    def object(self, part: Schema, root: Schema, depth: int) -> str:
        properties = properties_of(part)
        if not properties:
            return '"{}"' if part.get("additionalProperties") is False else self._free("{", "}")
        required = part.get("required", ())
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
        item = self._rules.rule(self.value(part.get("items"), root, depth + 1))
        items = f'{item} ("," {item})*'
        return f'"[" {items} "]"' if part.get("minItems", 0) else f'"[" ({items})? "]"'

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
        quote = "" if _BARE_KEY.fullmatch(name) else self._quote
        return self._rules.word(f"{quote}{name}{quote}:")

    def _literal(self, item: Any) -> str:
        quote = self._quote if isinstance(item, str) else ""
        return self._rules.word(f"{quote}{item if quote else json.dumps(item)}{quote}")
