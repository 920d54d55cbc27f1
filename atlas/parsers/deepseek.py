"""Calls as DeepSeek's models write them, in three notations.

V3, R1 and their distillations; V3.1 (both between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>):

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>

V3.2, whose parameters say whether they are strings:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

Sources: the chat templates of deepseek-ai/DeepSeek-R1 and DeepSeek-V3.1, the encoding of DeepSeek-V3.2.
"""

from __future__ import annotations

from atlas.parsers.calls import Calls, ToolFormat
from atlas.parsers.cursor import Cursor, NotACallError, Reading
from atlas.parsers.json_object import members
from atlas.parsers.typeless import read_invokes

_LIST, _LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeek(ToolFormat):
    """V3, R1 and V3.1. A single call may lack the tags of the list."""

    opens = (_LIST, _CALL)
    ends = (_LIST_END,)
    inner = (_CALL_END, _SEPARATOR)

    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        if opened == _LIST and not (yield from cursor.accept(_CALL)):
            raise NotACallError
        while True:
            yield from self._call(cursor, calls)
            if (yield from cursor.accept(_CALL, _LIST_END)) != _CALL:
                return

    def _call(self, cursor: Cursor, calls: Calls) -> Reading[None]:
        name = yield from cursor.name()
        if not (yield from cursor.accept(_SEPARATOR)):
            raise NotACallError
        fenced = False
        if not (yield from cursor.accept("{")):
            name, fenced = (yield from cursor.name()), True
            if not (yield from cursor.accept("```json")) or not (yield from cursor.accept("{")):
                raise NotACallError
        calls.begin(name)
        yield from members(cursor, calls.member)
        calls.end()
        if fenced:
            yield from cursor.accept("```")
        yield from cursor.accept(_CALL_END)
        cursor.keep()


class DeepSeekV32(ToolFormat):
    """V3.2."""

    opens = ("<｜DSML｜function_calls>",)
    ends = ("</｜DSML｜function_calls>",)
    inner = ("｜DSML｜",)

    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        yield from read_invokes(cursor, calls, "｜DSML｜", "</｜DSML｜function_calls>", is_string="string")
