"""What grammars of all formats are made of: rules in Lark as llguidance takes it, and what a schema means for them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from atlas.engine.grammar import WHITESPACE
from atlas.errors import RequestError

Schema = Mapping[str, Any]
Special = Mapping[str, int]

COMBINED = ("allOf", "anyOf", "oneOf", "not", "if")
COUNTED = ("minProperties", "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas")
_OUTSIDE = ("$defs", "definitions")
"""Parts of a schema that parts of it refer to."""

_BY_NAME = ("properties", "patternProperties", "dependentSchemas", *_OUTSIDE)
_DATA = ("enum", "const")
_NOTES = ("description", "title", "examples", "default", "$comment", "deprecated")


_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": f"{_BYTE}([.]{_BYTE}){{3}}",
    "email": "[A-Za-z0-9_%+-]{1,20}([.][A-Za-z0-9_%+-]{1,20}){0,2}@[A-Za-z0-9]{1,30}([.-][A-Za-z0-9]{1,30}){1,4}",
}
"""Of strings that are written as bare text; others cannot be enforced there."""


def has_limits(part: Schema) -> bool:
    """Whether a schema restricts what a string may be."""
    return bool(_limits(part, "\n"))


class Rules:
    """Rules as they are written down, and names for them.

    special: ids of the special tokens by their text: no other token can stand for them.
    strict: tools whose schemas have to be enforced whole; of others what cannot be is left out.
    opened: the word that opens calls, where it has been written already: it is left out.
    """

    def __init__(self, special: Special, strict: Collection[str] = ()) -> None:
        self.special = special
        self.opened = ""
        self._strict, self._lenient, self._tool = strict, True, ""
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
        if self.opened:
            text = text.removeprefix(self.opened)
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
        whole["x-guidance"] = {"whitespace_pattern": WHITESPACE, "lenient": self._lenient}
        return self.rule(f"%json {json.dumps(whole, ensure_ascii=False)}")

    def tool(self, name: str) -> None:
        """What follows is of this tool."""
        self._tool, self._lenient = name, name not in self._strict

    def hold_format(self, part: Any) -> None:
        """As `hold`, for the formats that are not enforced."""
        if isinstance(part, Mapping) and part.get("format") not in (None, *_FORMATS):
            self.hold(part, "format")

    def hold(self, part: Any, *keywords: str) -> None:
        """These keywords are not enforced in this notation. Raises RequestError, whose `where` is the tool's name, if a
        strict one has any of them in `part`."""
        for keyword in keywords if isinstance(part, Mapping) and not self._lenient else ():
            if keyword in part:
                found = f"{keyword}, which cannot be enforced in the notation of this model's calls"
                raise RequestError(self._tool, found, "a schema without it, or a tool that is not strict")

    def until(self, word: str, *never: str, frame: str = "", part: Schema | None = None) -> str:
        """Any text without these words, and then `word`. frame: stands before it.  part: what the text must be."""
        parts = [_without(word, *never), *_limits(part or {}, frame)]
        found = self._pieces.search(word)
        text = frame + (word[: found.start()] if found else word)
        # One terminal with the closing word, so that nothing is left for the lexer to decide; a special token ends it.
        name = self.rule(f"({' & '.join(parts)}) {self.word(text)}", letter="T")
        return f"{name} {self.word(word[found.start() :])}" if found else name

    def free(self, *never: str, begins: tuple[str, ...] = ()) -> str:
        """Any text without the words `never`, that does not begin with one of `begins`."""
        name = self.new_name("T")
        parts = [_without(*never), *(f"~/\\s*{_escaped(word)}(?s:.*)/" for word in begins)]
        self._lines.append(f"{name}: {' & '.join(parts)}")
        return name

    def new_name(self, letter: str = "r") -> str:
        self._names += 1
        return f"{letter}{self._names}"


def _without(*words: str) -> str:
    """Any text that has none of the words."""
    return " & ".join(["/(?s:.*)/", *(f"~/(?s:.*){_escaped(word)}(?s:.*)/" for word in words)])


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
    if (named := part.get("format")) in _FORMATS:
        limits.append(f"/{_FORMATS[named]}/")
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
