"""What a continuation must be, as users write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from atlas.engine.sampling import Grammar, GrammarSyntax
from atlas.errors import RequestError

_SYNTAX: Mapping[str, GrammarSyntax] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}


def grammar_of(value: Any, where: str) -> Grammar | None:
    """A mapping with one of `json` (a schema: a mapping, its text, or a pydantic model), `json_object` (True), `regex`,
    `choice` (strings) and `grammar` (Lark, or GBNF). It is not compiled here.

    Raises:
        RequestError: another option, more than one, or a value of the wrong type.
    """
    if value is None or isinstance(value, Grammar):
        return value
    names = ", ".join(_SYNTAX)
    if not isinstance(value, Mapping):
        raise RequestError(where, repr(value)[:60], f"a mapping with one of {names}")
    given = {name: entry for name, entry in value.items() if entry is not None and entry is not False}
    if len(given) != 1 or (name := next(iter(given))) not in _SYNTAX:
        raise RequestError(where, ", ".join(map(str, given))[:60] or "nothing", f"one of {names}")
    entry, syntax, where = given[name], _SYNTAX[name], f"{where}[{name!r}]"
    if syntax == "json_object":
        return Grammar("json_object")
    if syntax == "json_schema":
        if hasattr(entry, "model_json_schema"):
            entry = entry.model_json_schema()
        if isinstance(entry, Mapping):
            entry = _json(entry, where)
    elif syntax == "choice":
        if isinstance(entry, str) or not isinstance(entry, Sequence):
            raise RequestError(where, repr(entry)[:60], "a list of strings")
        entry = _json(list(entry), where)
    if not isinstance(entry, str):
        raise RequestError(where, repr(entry)[:60], "a text" if syntax != "json_schema" else "a JSON Schema")
    return Grammar("gbnf" if syntax == "lark" and "::=" in entry else syntax, entry)


def _json(value: Any, where: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(where, str(error)[:80], "what JSON can hold") from None
