"""What formats that write values as bare text between tags have in common."""

from __future__ import annotations

from atlas.parsers.calls import Calls
from atlas.parsers.cursor import MOST_NAME, BrokenCallError, Cursor, NotACallError, Reading


def without_frame(value: str) -> str:
    """A value without the line break after its opening and before its closing tag, where there are such."""
    return value.removeprefix("\n").removesuffix("\n")


def read_invokes(cursor: Cursor, calls: Calls, prefix: str, outer: str, *, is_string: str = "") -> Reading[None]:
    """Read `<invoke name="...">` elements with their `<parameter name="...">` up to the closing outer tag.

    prefix: stands before the names of tags.  outer: the closing tag.
    is_string: an attribute of a parameter that says "true" for strings and "false" for others.
    """
    invoke = f"<{prefix}invoke name="
    if not (yield from cursor.accept(invoke)):
        raise NotACallError
    while True:
        name = yield from _quoted(cursor)
        if name is None or not (yield from cursor.accept(">")):
            raise NotACallError
        calls.begin(name)
        last = yield from _parameters(cursor, calls, prefix, outer, is_string)
        calls.end()
        if last == outer:
            return
        cursor.keep()
        if (yield from cursor.accept(invoke, outer)) != invoke:
            return


def _parameters(cursor: Cursor, calls: Calls, prefix: str, outer: str, is_string: str) -> Reading[str]:
    """Read the parameters of one call, and the tag that closes it or, that one missing, the outer one."""
    start, stop, end = f"<{prefix}parameter name=", f"</{prefix}parameter>", f"</{prefix}invoke>"
    while True:
        word = yield from cursor.accept(start, end, outer)
        if word is None:
            raise BrokenCallError("")
        if word != start:
            return word
        name = yield from _quoted(cursor)
        stated: bool | None = None
        if name is not None and is_string and (yield from cursor.accept(is_string + "=")):
            stated = (yield from _quoted(cursor)) == "true"
        if name is None or not (yield from cursor.accept(">")):
            raise BrokenCallError(start + (name or ""))
        value, word = yield from cursor.until(stop, outer)
        if word != stop:
            raise BrokenCallError(f'{start}"{name}">{value}', ended=word is not None)
        calls.parameter(name, value if is_string else without_frame(value), is_string=stated)


def _quoted(cursor: Cursor) -> Reading[str | None]:
    """An attribute's value, or None."""
    quote = yield from cursor.accept('"', "'")
    if quote is None:
        return None
    text, word = yield from cursor.until(quote, most=MOST_NAME)
    return text if word else None
