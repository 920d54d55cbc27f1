"""Which fields of a decoded body nothing reads: whatever its struct, or a struct inside it, does not have."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

MAX_REPORTED = 32

_INDEX = re.compile(r"\[\d+\]")


def unknown_fields(value: Any, kind: type[msgspec.Struct], ignore_empty: Collection[str] = ()) -> list[str]:
    """The paths of the fields of `value` that `kind` has no place for, the first MAX_REPORTED of them.

    Of fields that differ by their place in a list only the first is named: with `messages[2].foo` a later
    `messages[5].foo` is left out. What is inside a value of any type (JSON Schemas, metadata) is not looked at.

    Args:
        value: a decoded body that converts to `kind`.
        ignore_empty: fields, as `general_path` writes them, that say nothing where they are null or empty.
    """
    found: dict[str, str] = {}  # in the order of the body
    for path in _walk(value, _type_info(kind), "", frozenset(ignore_empty)):
        found.setdefault(general_path(path), path)
        if len(found) == MAX_REPORTED:
            break
    return list(found.values())


@functools.cache
def _type_info(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)  # milliseconds, for a request with tools


def general_path(path: str) -> str:
    """`messages[2].foo` as `messages[].foo`."""
    return _INDEX.sub("[]", path)


def _walk(value: Any, kind: inspect.Type, path: str, ignore_empty: frozenset[str]) -> Iterator[str]:
    if isinstance(value, dict):
        struct = _struct_of(kind, value)
        if struct is not None:
            fields = _fields(struct.cls)
            for name, given in value.items():
                inner = f"{path}.{name}" if path else name
                if name not in fields:
                    if name != struct.tag_field and (given or general_path(inner) not in ignore_empty):
                        yield inner
                elif (field := fields[name]) is not None:
                    yield from _walk(given, field, inner, ignore_empty)
        else:
            for mapping in _members(kind, inspect.DictType):
                if _holds_structs(mapping.value_type):
                    for name, given in value.items():
                        yield from _walk(given, mapping.value_type, f"{path}.{name}", ignore_empty)
    elif isinstance(value, list):
        for sequence in _members(kind, inspect.ListType):
            if _holds_structs(sequence.item_type):
                for position, item in enumerate(value):
                    yield from _walk(item, sequence.item_type, f"{path}[{position}]", ignore_empty)


def _members(kind: inspect.Type, wanted: type[Any]) -> list[Any]:
    """The alternatives of a type that are of one sort; itself if it is no union."""
    types = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    plain = [one.type if isinstance(one, inspect.Metadata) else one for one in types]
    nested = [inner for one in plain if isinstance(one, inspect.UnionType) for inner in _members(one, wanted)]
    return [one for one in plain if isinstance(one, wanted)] + nested


def _struct_of(kind: inspect.Type, value: Mapping[str, Any]) -> inspect.StructType | None:
    """The struct that a JSON object becomes: the only one, or the one of its tag."""
    structs: list[inspect.StructType] = _members(kind, inspect.StructType)
    for struct in structs:
        if len(structs) == 1 or value.get(struct.tag_field or "") == struct.tag:
            return struct
    return None


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, inspect.Type | None]:
    """A struct's fields by their JSON names; None: of a type in which there is nothing to find."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type if _holds_structs(field.type) else None for field in info.fields}


def _holds_structs(kind: inspect.Type) -> bool:
    match kind:
        case inspect.StructType():
            return True
        case inspect.Metadata():
            return _holds_structs(kind.type)
        case inspect.UnionType():
            return any(map(_holds_structs, kind.types))
        case inspect.ListType():
            return _holds_structs(kind.item_type)
        case inspect.DictType():
            return _holds_structs(kind.value_type)
    return False
