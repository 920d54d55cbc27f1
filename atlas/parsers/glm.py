"""Calls as GLM-4.5, 4.6 and 4.7 write them; 4.7 without the line breaks.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Strings stand as they are, other values as JSON; which of both the tool's schema says. A name without arguments is a
call only if the request has such a tool. Source: the chat templates of zai-org/GLM-4.5 and GLM-4.6.
"""

from __future__ import annotations

from atlas.parsers.calls import Calls, ToolFormat
from atlas.parsers.cursor import MOST_NAME, BrokenCallError, Cursor, NotACallError, Reading


class Glm(ToolFormat):
    opens = ("<tool_call>",)
    ends = ("</tool_call>",)
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        name = yield from cursor.name()
        word = yield from cursor.accept("<arg_key>", "</tool_call>")
        if word is None or (word == "</tool_call>" and not calls.declared(name)):
            raise NotACallError
        calls.begin(name)
        while word == "<arg_key>":
            yield from self._argument(cursor, calls)
            word = yield from cursor.accept("<arg_key>", "</tool_call>")
        if word is None:
            raise BrokenCallError("")
        calls.end()

    def _argument(self, cursor: Cursor, calls: Calls) -> Reading[None]:
        key, word = yield from cursor.until("</arg_key>", most=MOST_NAME)
        if word is None or not (yield from cursor.accept("<arg_value>")):
            raise BrokenCallError("<arg_key>" + key)
        value, word = yield from cursor.until("</arg_value>", "</tool_call>")
        if word != "</arg_value>":
            raise BrokenCallError(f"<arg_key>{key}</arg_key><arg_value>{value}", ended=word is not None)
        calls.parameter(key.strip(), value)
