"""JSON that arrives in pieces: an object is handed on member by member, in the words of the model.

Nothing is written anew: numbers, escapes and the order of keys stay as they are. Each member is checked once, when
it is whole. The one repair made: a raw control character inside a string, a mistake models make with line breaks,
becomes its escape, which is what it must have meant; so does a backslash right before one, as in a shell command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NoReturn

from atlas.parsers.cursor import MOST_HELD, BrokenCallError, Cursor, Reading

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONTROL = re.compile(r"\\?[\x00-\x1f]|\\.", re.DOTALL)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Numbers are left as text: they are only checked, and Python refuses to convert very long ones.
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_refuse)


def parsed(text: str) -> str | None:
    """The text if it is JSON, repaired where it can be, or None."""
    for repaired in (text, _STRING.sub(_escape, text)):
        try:
            _DECODER.decode(repaired)
        except (ValueError, RecursionError):
            continue
        return repaired
    return None


def _escape(string: re.Match[str]) -> str:
    return _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1] if found[0][-1] < " " else found[0], string[0])


def span(cursor: Cursor, *, quote: str = '"', escapes: bool = True, most: int = MOST_HELD) -> Reading[tuple[str, str]]:
    """The text of one value or member, and the `,` `}` or `]` after it, which is read too.

    quote: the word around strings.  escapes: a backslash in a string takes what follows along.
    Raises BrokenCallError if the text ends first.
    """
    outside, inside = (quote, "{", "}", "[", "]", ","), (quote, "\\") if escapes else (quote,)
    pieces: list[str] = []
    size = depth = 0
    quoted = False
    while True:
        try:
            text, word = yield from cursor.until(*(inside if quoted else outside), most=most - size)
        except BrokenCallError as error:
            raise BrokenCallError("".join(pieces) + error.rest) from None
        if word is None:
            raise BrokenCallError("".join(pieces) + text)
        if not quoted and depth == 0 and word in (",", "}", "]"):
            pieces.append(text)
            return "".join(pieces), word
        if word == "\\":
            word += yield from cursor.character()
        elif word == quote:
            quoted = not quoted
        elif word != ",":
            depth += 1 if word in "{[" else -1
        pieces += (text, word)
        size += len(text) + len(word)
        if size > most:
            raise BrokenCallError("".join(pieces))


def json_member(text: str) -> str | None:
    """The text if it is a member of a JSON object, repaired where it can be, or None."""
    whole = parsed("{" + text + "}")
    return whole[1:-1] if whole else None


def members(
    cursor: Cursor,
    out: Callable[[str], None],
    convert: Callable[[str], str | None] = json_member,
    *,
    quote: str = '"',
    escapes: bool = True,
) -> Reading[None]:
    """Hand out the members of an object, each once it is whole, up to the brace that closes it.

    The opening brace has been read. A comma after the last member is no fault: models write it.
    convert: a member of another notation as JSON text, or None if it is none.  quote, escapes: as `span`.
    """
    while True:
        text, stop = yield from span(cursor, quote=quote, escapes=escapes)
        if text.strip():
            member = convert(text)
            if not member or stop == "]":
                raise BrokenCallError(text + stop)
            out(member)
        elif stop != "}":
            raise BrokenCallError(text + stop)
        if stop == "}":
            return
