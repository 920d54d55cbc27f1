"""Calls as Mistral's models write them, in two notations.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]          tokenizers v3, v7
    [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}                v11; v13 has no [CALL_ID]

Several calls stand in the list, or the newer form is repeated. The templates demand ids
of nine letters or digits. Source: mistralai/mistral-common, `tokens/tokenizers/instruct.py` and the page on tools.
"""

from __future__ import annotations

import re
import secrets
import string

from atlas.parsers.calls import Calls, ToolFormat
from atlas.parsers.cursor import Cursor, NotACallError, Reading
from atlas.parsers.json_call import read_call
from atlas.parsers.json_object import members

_ID = re.compile(r"[a-zA-Z0-9]{9}")


class Mistral(ToolFormat):
    opens = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")

    def new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        first = yield from cursor.accept("[", "{")
        if first == "[":
            yield from self._list(cursor, calls)
        elif first == "{":  # a list of one, without its brackets
            yield from read_call(cursor, calls)
        else:
            yield from self._named(cursor, calls)

    def _list(self, cursor: Cursor, calls: Calls) -> Reading[None]:
        if not (yield from cursor.accept("{")):
            raise NotACallError
        while True:
            yield from read_call(cursor, calls)
            cursor.keep()
            if (yield from cursor.accept(",", "]")) != ",":
                return
            if not (yield from cursor.accept("{")):
                raise NotACallError

    def _named(self, cursor: Cursor, calls: Calls) -> Reading[None]:
        name = yield from cursor.name()
        word = yield from cursor.accept("[ARGS]", "[CALL_ID]", "{")
        identifier = ""
        if word == "[CALL_ID]":
            identifier = yield from cursor.name()
            word = yield from cursor.accept("[ARGS]")
        if word == "[ARGS]":
            word = yield from cursor.accept("{")
        if word != "{":
            raise NotACallError
        calls.begin(name, identifier if _ID.fullmatch(identifier) else None)
        yield from members(cursor, calls.member)
        calls.end()
