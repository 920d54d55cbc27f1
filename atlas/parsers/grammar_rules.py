"""What grammars of all formats are made of: rules in Lark as llguidance takes it, and what a schema means for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from atlas.engine.grammar import WHITESPACE

Schema = Mapping[str, Any]
Special = Mapping[str, int]

_OUTSIDE = ("$defs", "definitions")
"""Parts of a schema that parts of it refer to."""

_BY_NAME = ("properties", "patternProperties", "dependentSchemas", *_OUTSIDE)
_DATA = ("enum", "const")
_NOTES = ("description", "title", "examples", "default", "$comment", "deprecated")


class Rules:
    """Rules as they are written down, and names for them.

    special: ids of the special tokens by their text: no other token can stand for them.
    """

    def __init__(self, special: Special) -> None:
        self.special = special
        self._lines: list[str] = []
        self._made: dict[str, str] = {}
        self._names = 0
        words = sorted(special, key=len, reverse=True)
        self._pieces = re.compile("|".join(map(re.escape, words)) or r"(?!)")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def rule(self, body: str, name: str = "", *, letter: str = "r") -> str:
        """The name of a rule; the same for the same body, unless it is named."""
        if not name and (made := self._made.get(body)) is not None:
            return made
        name = name or self.new_name(letter)
        self._made.setdefault(body, name)
        self._lines.append(f"{name}: {body}")
        return name

    def word(self, *words: str) -> str:
        """These words one after another."""
        text, terms, at = "".join(words), [], 0
        for match in self._pieces.finditer(text):
            terms += [json.dumps(text[at : match.start()], ensure_ascii=False)] if match.start() > at else []
            terms.append(f"<[{self.special[match[0]]}]>")
            at = match.end()
        terms += [json.dumps(text[at:], ensure_ascii=False)] if at < len(text) else []
        return " ".join(terms)

    def choice(self, options: Sequence[str]) -> str:
        """One of these bodies."""
        return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"

    def json(self, schema: Schema, root: Schema | None = None) -> str:
        """A JSON text. root: the schema that this one is a part of."""
        whole = _without_notes(schema)
        if root and '"$ref"' in json.dumps(whole):
            whole |= {name: _without_notes(root[name]) for name in _OUTSIDE if name in root and name not in schema}
        whole["x-guidance"] = {"whitespace_pattern": WHITESPACE, "lenient": True}
        return self.rule(f"%json {json.dumps(whole, ensure_ascii=False)}")

    def until(self, word: str, *never: str, frame: str = "", part: Schema | None = None) -> str:
        """Any text without these words, and then `word`. frame: stands before it.  part: what the text must be."""
        parts = [
            "/(?s:.*)/",
            *(f"~/(?s:.*){_escaped(found)}(?s:.*)/" for found in (word, *never)),
            *_limits(part or {}, frame),
        ]
        found = self._pieces.search(word)
        text = frame + (word[: found.start()] if found else word)
        # One terminal with the closing word, so that nothing is left for the lexer to decide; a special token ends it.
        name = self.rule(f"({' & '.join(parts)}) {self.word(text)}", letter="T")
        return f"{name} {self.word(word[found.start() :])}" if found else name

    def new_name(self, letter: str = "r") -> str:
        self._names += 1
        return f"{letter}{self._names}"


def arguments_schema(schema: Schema) -> Schema:
    """The schema of a call's arguments: an object, with no other members than those it names, if it names any."""
    result = {"type": "object", **schema}
    open_parts = ("patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if")
    if not schema or ("properties" in schema and not any(part in schema for part in open_parts)):
        result.setdefault("properties", {})
        result.setdefault("additionalProperties", False)
    return result


def _without_notes(schema: Any) -> Any:
    """The schema without what it only says to people: for many tools that is most of it."""
    if isinstance(schema, list):
        return [_without_notes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            result[key] = {name: _without_notes(part) for name, part in value.items()}
        elif key not in _NOTES:
            result[key] = value if key in _DATA else _without_notes(value)
    return result


def properties_of(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _limits(part: Schema, frame: str) -> list[str]:
    """What a schema says of a string, as regular expressions. Parsers take one line break off both sides of a value, so
    one that is limited must not have its own there if the grammar writes none (`frame`)."""
    limits = []
    least, most = part.get("minLength", 0), part.get("maxLength")
    if _is_count(least) and (most is None or _is_count(most)) and (least or most is not None):
        limits.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inside = pattern.removeprefix("^")
        inside = inside if end else inside.removesuffix("$")
        limits.append(f"/{begin}({slashed(inside)}){end}/")
    if limits and not frame:
        limits.append(r"~/\n(?s:.*)/ & ~/(?s:.*)\n/")
    return limits


def slashed(pattern: str) -> str:
    """A regular expression that can stand between slashes."""
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 100_000


def _escaped(word: str) -> str:
    return re.escape(word).replace("/", "\\/")


def repeated(item: str, gap: str, one: bool) -> str:
    """One item, or several with `gap` between them."""
    return item if one else f"{item} ({gap} {item})*".replace("  ", " ")
