"""Which fields of a decoded body nothing reads: whatever its struct, or a struct inside it, does not have."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection
from typing import Any

import msgspec
from msgspec import inspect

MAX_REPORTED = 32

NO_FIELD = "no field of this request"
NO_SWITCH = "this model's template has no switch for it"
NOT_SHOWN = "this model's template does not show it"
NO_PARAMETER = "this endpoint takes what it is asked for in the body"
"""Why nothing reads a field."""

_INDEX = re.compile(r"\[\d+\]")
_LONGEST_NAME = 64


class Unread(str):
    """The path of a field that nothing reads.

    why: what an error says of it.  siblings: the fields that exist where it stands.
    """

    why: str
    siblings: frozenset[str]

    def __new__(cls, path: str, why: str = NO_FIELD, siblings: frozenset[str] = frozenset()) -> Unread:
        self = super().__new__(cls, path)
        self.why, self.siblings = why, siblings
        return self

    def renamed(self, path: str) -> Unread:
        """The same under another path."""
        return Unread(path, self.why, self.siblings)

    def meant(self) -> str | None:
        """The field whose name is so much like this one's that it is a slip of the pen. Takes a millisecond: it is for
        what is said once, not for every request."""
        name = self.rpartition(".")[2].lower()
        if len(name) > _LONGEST_NAME:  # the time grows with its square
            return None
        near = difflib.get_close_matches(name, sorted(self.siblings), n=1, cutoff=0.75)
        return near[0] if near else None


def unknown_fields(value: Any, kind: type[msgspec.Struct], ignore_empty: Collection[str] = ()) -> list[str]:
    """The paths of the fields of `value` that `kind` has no place for, the first MAX_REPORTED of them, each
    an `Unread`.

    Of fields that differ by their place in a list only the first is named: with `messages[2].foo` a later
    `messages[5].foo` is left out. What is inside a value of any type (JSON Schemas, metadata) is not looked at.

    Args:
        value: a decoded body that converts to `kind`.
        ignore_empty: fields, as `general_path` writes them, that say nothing where they are null or empty.
    """
    search = _Search(frozenset(ignore_empty))
    search.walk(_Plan(only=kind), value, None, "")
    return [*search.found.values()]


def general_path(path: str) -> str:
    """`messages[2].foo` as `messages[].foo`."""
    return _INDEX.sub("[]", path)


Path = tuple[Any, str | int] | None
"""The way to a value, last step first: (the way to what it is in, its name or index). Text is made of the few that are
reported: a body may hold a million values."""


class _Plan(msgspec.Struct, frozen=True):
    """Where to look in values of one type. A JSON object becomes a struct: `only`, or that of its tag."""

    only: type[msgspec.Struct] | None
    by_tag: dict[Any, type[msgspec.Struct]] = {}
    tag_field: str = ""
    values: _Plan | None = None
    items: _Plan | None = None

    def struct_of(self, value: dict[str, Any]) -> type[msgspec.Struct] | None:
        return self.by_tag.get(value.get(self.tag_field)) if self.only is None else self.only


class _Fields(msgspec.Struct, frozen=True):
    """A struct's fields by their JSON names, its tag among them; and those in which there is something to find."""

    names: frozenset[str]
    inner: dict[str, _Plan]


class _Search:
    def __init__(self, ignore_empty: frozenset[str]) -> None:
        self._ignore_empty = ignore_empty
        self.found: dict[str, Unread] = {}  # general path -> path, in the order of the body

    def walk(self, plan: _Plan, value: Any, path: Path, general: str) -> None:
        """`general`: the general path of `value`, with a dot at its end if it has any."""
        if isinstance(value, list):
            if plan.items is not None:
                general = f"{general.removesuffix('.')}[]."
                for position, item in enumerate(value):
                    self.walk(plan.items, item, (path, position), general)
        elif isinstance(value, dict):
            struct = plan.struct_of(value)
            if struct is None:
                for name, given in value.items() if plan.values is not None else ():
                    assert plan.values is not None
                    self.walk(plan.values, given, (path, name), f"{general}{name}.")
                return
            fields = _fields(struct)
            if value.keys() <= fields.names:
                for name, inner in fields.inner.items():
                    if isinstance(given := value.get(name), dict | list):
                        self.walk(inner, given, (path, name), f"{general}{name}.")
                return
            for name, given in value.items():
                if name in fields.names:
                    if name in fields.inner:
                        self.walk(fields.inner[name], given, (path, name), f"{general}{name}.")
                elif (where := f"{general}{name}") not in self.found and len(self.found) < MAX_REPORTED:
                    self._report(where, (path, name), given, fields.names)

    def _report(self, where: str, path: Path, given: Any, siblings: frozenset[str]) -> None:
        if given is not None and (given or where not in self._ignore_empty):  # null is the same as leaving it out
            self.found[where] = Unread(_text(path), siblings=siblings)


def _text(path: Path) -> str:
    steps: list[str | int] = []
    while path is not None:
        path, step = path
        steps.append(step)
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in reversed(steps))
    return text.removeprefix(".")


def _plan(kind: inspect.Type) -> _Plan | None:
    """None: there is nothing to find."""
    types = _alternatives(kind)
    structs = [one for one in types if isinstance(one, inspect.StructType)]
    values = [plan for one in types if isinstance(one, inspect.DictType) and (plan := _plan(one.value_type))]
    items = [plan for one in types if isinstance(one, inspect.ListType) and (plan := _plan(one.item_type))]
    if not structs and not values and not items:
        return None
    several = len(structs) > 1
    return _Plan(
        only=structs[0].cls if len(structs) == 1 else None,
        by_tag={one.tag: one.cls for one in structs} if several else {},
        tag_field=(structs[0].tag_field or "") if several else "",
        values=values[0] if values else None,
        items=items[0] if items else None,
    )


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    match kind:
        case inspect.Metadata():
            return _alternatives(kind.type)
        case inspect.UnionType():
            return [one for part in kind.types for one in _alternatives(part)]
    return [kind]


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> _Fields:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    tag = {info.tag_field} if info.tag_field is not None else set()
    names = tag | {field.encode_name for field in info.fields}
    inner = {field.encode_name: plan for field in info.fields if (plan := _plan(field.type)) is not None}
    return _Fields(frozenset(names), inner)
