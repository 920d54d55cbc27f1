"""What the readers of all formats share: the calls of an answer as they are found."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from atlas.parsers.cursor import Cursor, NotACallError, Reading, is_name
from atlas.parsers.events import CallArguments, CallBegin, CallEnd, Event
from atlas.parsers.schema_types import json_text

Tools = Mapping[str, Mapping[str, Any]]
"""The tools a request declares: name -> JSON schema of the parameters."""


class ToolFormat(ABC):
    """How one family of models writes calls. Has no state: one object serves all answers.

    opens: words that open a call, or a list of calls, anywhere in the text.
    bare: words that do so only where the content begins, for formats in which calls have no marker of their own.
    ends: words after which text goes on, should a call in between be broken; none: the call was all the rest.
    inner: the other words. A special token that is part of any of the words must be shown by the detokeniser.
    """

    opens: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """All words of the format."""
        return (*self.opens, *self.bare, *self.ends, *self.inner)

    def new_id(self) -> str:
        return "call_" + secrets.token_hex(12)

    @abstractmethod
    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        """Read what follows the opening word. Raises NotACallError if it is no call after all, and
        BrokenCallError if it is one that cannot be read to its end."""


class Calls:
    """Takes down calls as a reader finds them. One at a time is open."""

    def __init__(self, tools: Tools, cursor: Cursor, events: list[Event], new_id: Callable[[], str]) -> None:
        self._tools = tools
        self._cursor = cursor
        self._events = events
        self._new_id = new_id
        self._index = -1
        self._name = ""
        self._members = 0
        self.open = False

    def declared(self, name: str) -> bool:
        return name in self._tools

    def begin(self, name: str, identifier: str | None = None) -> None:
        """From here on this is a call, whatever follows. A name that can be none raises NotACallError."""
        if not is_name(name):
            raise NotACallError
        self._cursor.drop()
        self._index += 1
        self._name, self._members, self.open = name, 0, True
        self._events.append(CallBegin(self._index, identifier or self._new_id(), name))
        self._arguments("{")

    def member(self, text: str) -> None:
        """One whole argument, as it stands in a JSON object."""
        self._arguments("," + text if self._members else text)
        self._members += 1

    def parameter(self, name: str, value: str, *, is_string: bool | None = None) -> None:
        """One whole argument of a format without types. is_string: what the format says of this one."""
        if is_string:
            written = json.dumps(value, ensure_ascii=False)
        else:
            schema = self._tools.get(self._name, {})
            written = json_text(value, name, schema, any_type=is_string is False)
        gap = " " if self._members else ""
        self.member(f"{gap}{json.dumps(name, ensure_ascii=False)}: {written}")

    def end(self) -> None:
        self._arguments("}")
        self.open = False
        self._events.append(CallEnd(self._index))

    def cut(self, rest: str) -> None:
        """The open call ends here without being complete."""
        self.open = False
        self._events.append(CallEnd(self._index, complete=False, rest=rest))

    def _arguments(self, text: str) -> None:
        self._events.append(CallArguments(self._index, text))
