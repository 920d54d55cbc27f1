"""A call written as a JSON object with the members `name` and `arguments` (or `parameters`)."""

from __future__ import annotations

import json

from atlas.parsers.calls import Calls
from atlas.parsers.cursor import MOST_HELD, MOST_NAME, BrokenCallError, Cursor, NotACallError, Reading
from atlas.parsers.json_object import members, parsed, span

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "function")
_KEYS = (*_ARGUMENTS, *_NAMES, "type", "id")


def read_call(cursor: Cursor, calls: Calls, *, only_declared: bool = False) -> Reading[None]:
    """Read such an object; its opening brace has been read.

    only_declared: nothing else marks this as a call, so it must name a tool of the request and have arguments.
    Arguments are handed on as they come where the name stands before them, else when all is there.
    """
    name: str | None = None
    arguments: str | None = None
    stop = ","
    while stop == ",":
        word = yield from cursor.accept('"', "}")
        if word != '"':
            raise NotACallError
        key, word = yield from cursor.until('"', most=16)
        if word is None or key not in _KEYS or not (yield from cursor.accept(":")):
            raise NotACallError
        if key in _ARGUMENTS and (yield from cursor.accept("{")):
            if name is not None:
                calls.begin(name)
                yield from members(cursor, calls.member)
                calls.end()
                yield from _close(cursor)
                return
            arguments = yield from _held(cursor)
            stop = (yield from cursor.accept(",", "}")) or ""
            continue
        text, stop = yield from span(cursor, most=MOST_HELD if key in _ARGUMENTS else 4 * MOST_NAME)
        if key in _NAMES:
            name = _name(text)
            if only_declared and not calls.declared(name):
                raise NotACallError
        elif key in _ARGUMENTS:
            arguments = _from_value(text)
    if stop != "}" or name is None or (only_declared and arguments is None):
        raise NotACallError
    calls.begin(name)
    if arguments:
        calls.member(arguments)
    calls.end()


def _name(text: str) -> str:
    try:
        name = json.loads(text)
    except (ValueError, RecursionError):
        raise NotACallError from None
    if not isinstance(name, str):
        raise NotACallError
    return name


def _held(cursor: Cursor) -> Reading[str]:
    """The members of arguments that stand before the name."""
    pieces: list[str] = []
    size = 0

    def out(member: str) -> None:
        nonlocal size
        size += len(member)
        if size > MOST_HELD:
            raise BrokenCallError("")
        pieces.append(member)

    yield from members(cursor, out)
    return ",".join(pieces)


def _from_value(text: str) -> str:
    """The members of arguments that are no object: null, or an object once more encoded as a string."""
    try:
        value = json.loads(text)
        inner = value.strip() if isinstance(value, str) else ""
        inner.encode()  # half of a surrogate pair has no encoding
    except (ValueError, RecursionError):
        raise NotACallError from None
    if value is None:
        return ""
    whole = parsed(inner) if inner.startswith("{") else None
    if whole is None:
        raise NotACallError
    return whole[1:-1].strip()


def _close(cursor: Cursor) -> Reading[None]:
    """Read the members after the arguments, and the closing brace. A call whose arguments are whole is whole."""
    stop = yield from cursor.accept(",", "}")
    while stop == ",":
        _, stop = yield from span(cursor, most=4 * MOST_NAME)
