"""How a request body is read.

A body is decoded once into plain values and then converted to a struct, so that fields Atlas does not know
can be reported, and fields it knows but does not support can be refused by name.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from atlas.serve.errors import ApiError, invalid, unsupported
from atlas.serve.reference import wrong_fields
from atlas.serve.reference.unknown_fields import unknown_fields

_AT = re.compile(r"(?P<what>.*) - at `(?P<path>\$.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")

LARGE_BODY = 1 << 20
MAX_VALUES = 1 << 17
"""Strings, lists and objects of a body: of 26,000 messages. To decode many small ones takes what no bound of bytes
tells: of 32 MB of empty lists a second, in which the interpreter does nothing else, and 800 MB."""
MAX_NUMBERS = 1 << 20
"""Numbers of a body, which take a tenth of that."""
MAX_FOUND = 200
"""Characters of an error that say what was found."""

_INSTEAD = {
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
    "chat_template": "leave it out, or start the server with --chat-template FILE",
}
"""What does the work of a field that is not supported."""

Body = TypeVar("Body", bound=msgspec.Struct)


def parse(
    body: bytes,
    kind: type[Body],
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
    integers: Sequence[str] = (),
    ignore_empty: Collection[str] = (),
) -> tuple[Body, list[str]]:
    """A request body, and the paths of the fields in it that nothing reads. Raises ApiError 400.

    neutral, integers: see `convert`.  ignore_empty: see `unknown_fields`. Of a large body this takes seconds at worst:
    it belongs into `Frontend.run`.
    """
    with _without_collector(len(body)):
        value = decode(body)
        return convert(value, kind, neutral, integers), unknown_fields(value, kind, ignore_empty)


@contextlib.contextmanager
def _without_collector(size: int) -> Iterator[None]:
    """Make millions of objects without looking through them for garbage again and again: that is most of the time that
    32 MB of small lists take (2.3 of 2.9 s), in which nothing else in this process runs."""
    if size < LARGE_BODY or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises ApiError 400, and 413 for one of too many parts."""
    if len(body) > MAX_VALUES:
        _check_values(body)
    if not body.strip():
        raise invalid(None, "empty", "a JSON object", code="invalid_json")
    try:
        with _without_collector(len(body)):
            value = msgspec.json.decode(body)
    except RecursionError:
        raise invalid(None, "nested too deeply", code="invalid_json") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise invalid(None, f"not valid JSON: {error}", "a JSON object", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, f"a JSON {_json_name(value)}", "a JSON object", code="invalid_json")
    return value


def _check_values(body: bytes) -> None:
    """Raises ApiError 413 for a body of too many parts, which are counted by their signs, without making any.

    It holds up others, too: so a look at the beginning comes first, and strings are left out only where it matters.
    """
    end, looked = LARGE_BODY // 2, 0
    while looked < len(body):
        part, looked, end = body[:end], end, 2 * end
        if _most(part) is not None:
            part = part.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_SIGNS)
            strings = part.count(b'"') // 2
            if strings <= MAX_VALUES:  # else it is not needed, and would be slow
                part = b"".join(part.split(b'"')[::2]) + b'""' * strings
            if (most := _most(part)) is not None:
                message = f"request body: more than {most[0]} {most[1]}; accepted: at most {most[0]} in one request"
                raise ApiError(413, "request_too_large", message)


def _most(part: bytes) -> tuple[int, str] | None:
    """The limit that a text of JSON is above, if all of its signs mean something."""
    if part.count(b'"') // 2 + part.count(b"[") + part.count(b"{") > MAX_VALUES:
        return MAX_VALUES, "strings, lists and objects"
    return (MAX_NUMBERS, "numbers") if part.count(b",") > MAX_NUMBERS else None


_NO_SIGNS = bytes(set(range(256)) - set(b'"[{,'))


def convert(
    value: dict[str, Any],
    kind: type[Body],
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
    integers: Sequence[str] = (),
) -> Body:
    """The struct that a decoded body stands for. Raises ApiError 400.

    neutral: fields that are known but not supported, with the values, besides null, that ask for nothing. They are
        taken out of `value`.
    integers: fields of whole numbers. Some writers spell large ones 1e18; such a number is whole whatever its type.
    """
    for name, values in (neutral or {}).items():
        if (given := value.pop(name, None)) is not None and not _among(given, values):
            raise unsupported(name, _shorten(given), _INSTEAD.get(name, "leave it out"))
    for name in integers:
        if isinstance(given := value.get(name), float) and abs(given) >= 2**53:
            value[name] = int(given)
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _explain(str(error), value, kind) from None


def _among(given: Any, values: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but `"n": true` is not 1.
    return any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in values)


def _explain(text: str, value: dict[str, Any], kind: type[msgspec.Struct]) -> ApiError:
    match = _AT.fullmatch(text)
    what, path = (match["what"], match["path"].removeprefix("$").lstrip(".")) if match else (text, "")
    if absent := _MISSING.fullmatch(what):
        field = absent["field"]
        where = f"{path}.{field}" if path else field
        missing = wrong_fields.missing(kind, value, path, field)
        return invalid(where, missing, wrong_fields.accepted(kind, where), code="missing_required_parameter")
    if len(what) > MAX_FOUND:  # it quotes the value, which may be megabytes
        what = what[:MAX_FOUND] + "..."
    found = wrong_fields.found(value, path, what) if path else what
    if path.endswith("role") and what.startswith("Invalid enum value"):
        return invalid(path, f"unknown role {found}", wrong_fields.accepted(kind, path))
    if re.search(r"content\[\d+\]\.type$", path):
        return invalid(path, found, "text parts only", code="unsupported_content")
    return invalid(path or None, found, wrong_fields.accepted(kind, path) if path else "")


def _json_name(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _shorten(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return "this value"
    return text if len(text) <= 60 else text[:57] + "..."
