"""JSON that a stranger may have written: parsed and checked field by field, with errors that name the field.

Checks are functions `(value, field) -> value`, combined to mirror the document. They trust nothing:
types, sizes, counts and characters are bounded before a value is used, and nothing here recurses
deeper than the document that is expected.
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Check = Callable[[Any, str], Any]

# Both always match what they begin with, so their time is linear whatever the text.
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = re.compile(r"[^\[\]{}]+")

_REPR = reprlib.Repr()
_REPR.maxstring = 60


class Malformed(ValueError):
    """field: which value, e.g. `sets[0].kernels[3].block`; found: what it is; accepted: what it may be."""

    def __init__(self, field: str, found: str, accepted: str = "") -> None:
        super().__init__(f"{field}: {found}")
        self.field, self.found, self.accepted = field, found, accepted


def parse(text: str, max_depth: int) -> Any:
    """The document in `text`. Refuses what JSON parsers let pass: duplicate keys, NaN, deep nesting; and fractions,
    which no document here has.

    Raises:
        Malformed: where that cannot be told, its field is empty.
    """
    # Before parsing: a parser recurses, and how deep it may is the interpreter's business, not this file's.
    brackets = _NOT_BRACKETS.sub("", _STRINGS.sub("", text))
    for _ in range(max_depth):
        brackets = brackets.replace("[]", "").replace("{}", "")
    if brackets:
        raise Malformed("", "brackets do not match, or are nested too deep", f"at most {max_depth} levels")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_float=_no_number, parse_constant=_no_number)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed("", f"not JSON ({error})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in result if names.count(name) > 1)
        raise Malformed(shown(twice), "the key stands twice in one object")
    return result


def _no_number(text: str) -> NoReturn:
    raise Malformed("", f"the number {shown(text)}", "integers only")


def shown(value: Any) -> str:
    """A value for a message: short, and printable ASCII whatever it holds."""
    return _REPR.repr(value).encode("ascii", "backslashreplace").decode()


def integer(low: int, high: int) -> Check:
    """An integer in low..high; no boolean."""

    def check(value: Any, field: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Malformed(field, f"is {shown(value)}", f"an integer in {low}..{high}")
        return value

    return check


def boolean(value: Any, field: str) -> bool:
    """true or false."""
    if type(value) is not bool:
        raise Malformed(field, f"is {shown(value)}", "true or false")
    return value


def text(pattern: str, accepted: str, limit: int = 256) -> Check:
    """A string of at most `limit` characters that `pattern` matches as a whole."""
    compiled = re.compile(pattern, re.ASCII)

    def check(value: Any, field: str) -> str:
        if not isinstance(value, str) or len(value) > limit or not compiled.fullmatch(value):
            raise Malformed(field, f"is {shown(value)}", f"{accepted}, at most {limit} characters")
        return value

    return check


def sequence(item: Check, low: int, high: int) -> Check:
    """A list of low..high items, as a tuple."""

    def check(value: Any, field: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise Malformed(field, f"is {shown(value)}", "a list")
        if not low <= len(value) <= high:
            raise Malformed(field, f"has {len(value)} items", f"{low}..{high}")
        return tuple(item(entry, f"{field}[{index}]") for index, entry in enumerate(value))

    return check


def fixed(*items: Check) -> Check:
    """A list with one check for each item, as a tuple."""

    def check(value: Any, field: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(items):
            raise Malformed(field, f"is {shown(value)}", f"a list of {len(items)}")
        return tuple(item(entry, f"{field}[{i}]") for i, (item, entry) in enumerate(zip(items, value, strict=True)))

    return check


def mapping(key: Check, item: Check, high: int) -> Check:
    """An object of at most `high` entries with free keys."""

    def check(value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Malformed(field, f"is {shown(value)}", "an object")
        if len(value) > high:
            raise Malformed(field, f"has {len(value)} entries", f"at most {high}")
        return {key(name, f"{field}, a key,"): item(entry, f"{field}.{name}") for name, entry in value.items()}

    return check


def record(cls: type[Any], fields: Mapping[str, Check], unwritten: tuple[str, ...] = ()) -> Check:
    """An object with exactly the fields of a dataclass; those with a default may be absent.

    unwritten: fields that never stand in a document.
    """
    declared = {field.name: field for field in dataclasses.fields(cls) if field.name not in unwritten}
    if set(declared) != set(fields):
        raise TypeError(f"{cls.__name__}: every field needs a check: {sorted(set(declared) ^ set(fields))}")
    missing = dataclasses.MISSING
    required = [n for n, f in declared.items() if f.default is missing and f.default_factory is missing]

    def check(value: Any, field: str) -> Any:
        prefix = f"{field}." if field else ""
        if not isinstance(value, dict):
            raise Malformed(field, f"is {shown(value)}", "an object")
        for name in value:
            if name not in fields:
                raise Malformed(field, f"has an unknown field {shown(name)}", ", ".join(fields))
        for name in required:
            if name not in value:
                raise Malformed(f"{prefix}{name}", "is missing")
        return cls(**{name: fields[name](entry, f"{prefix}{name}") for name, entry in value.items()})

    return check
