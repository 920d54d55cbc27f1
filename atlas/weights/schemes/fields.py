"""Reading a quantization_config: every field checked, every refusal naming it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atlas.errors import CheckpointError

_MOST = (1 << 20) - 1
"""The most rows or columns of a group: no matrix is larger, and indices of all of them fit."""


class Fields:
    """An object of a configuration file.

    file: path of the file.     where: name of the object in it, such as "quantization_config".
    """

    def __init__(self, values: Any, file: str, where: str) -> None:
        self.file, self.where = file, where
        if not isinstance(values, Mapping):
            raise CheckpointError(file, f"{where} is {_short(values)}", "an object")
        self.values = values

    def fail(self, field: str, accepted: str, fix: str = "") -> CheckpointError:
        found = f"is {_short(self.values[field])}" if field in self.values else "is missing"
        return CheckpointError(self.file, f"{self.where}.{field} {found}", accepted, fix)

    def get(self, field: str) -> Any:
        """The value; None where it is absent."""
        return self.values.get(field)

    def integer(self, field: str, accepted: Sequence[int] | range, default: int | None = None) -> int:
        value = self.values.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value not in accepted:
            listed = (
                f"{accepted[0]} to {accepted[-1]}" if isinstance(accepted, range) else ", ".join(map(str, accepted))
            )
            raise self.fail(field, listed)
        return value

    def group_size(self, field: str = "group_size", default: int | None = None) -> int:
        """Columns of a group; -1 for a whole row."""
        value = self.integer(field, range(-1, _MOST + 1), default)
        if value == 0:
            raise self.fail(field, "-1 or at least 1")
        return value

    def block(self, field: str, sizes: Any) -> tuple[int, int]:
        """Rows and columns of a block, which is what `sizes` of the field must be."""
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(x) is int and 0 < x <= _MOST for x in sizes):
            raise self.fail(field, f"two sizes of 1 to {_MOST}")
        return sizes[0], sizes[1]

    def flag(self, field: str, default: bool) -> bool:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(field, "true or false")
        return value

    def text(self, field: str, accepted: Sequence[str], default: str | None = None) -> str:
        """One of the accepted words, whatever its case."""
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, str) or value.lower() not in accepted:
            raise self.fail(field, ", ".join(accepted))
        return value.lower()

    def names(self, field: str) -> list[str]:
        """A list of strings; [] where it is absent or null."""
        value = self.values.get(field)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.fail(field, "a list of module names")
        return value

    def object(self, field: str) -> Fields:
        """The object in a field; an empty one where it is absent or null."""
        value = self.values.get(field)
        return Fields({} if value is None else value, self.file, f"{self.where}.{field}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
