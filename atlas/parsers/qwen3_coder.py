"""Calls as Qwen3-Coder, Qwen3-Next-Coder and Qwen3.5 and later write them.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Values have no type: the tool's schema says what they are. One line break after the opening and one before the closing
tag of a parameter belong to the format. The model at times leaves the outer tag out, so `<function=` opens a call of a
tool of the request by itself. Source: chat_template.jinja and qwen3coder_tool_parser.py of
Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

from atlas.parsers.calls import Calls, ToolFormat
from atlas.parsers.cursor import MOST_NAME, BrokenCallError, Cursor, NotACallError, Reading
from atlas.parsers.typeless import without_frame


class Qwen3Coder(ToolFormat):
    opens = ("<tool_call>", "<function=")
    ends = ("</tool_call>",)

    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        wrapped = opened == "<tool_call>"
        if wrapped and not (yield from cursor.accept("<function=")):
            raise NotACallError
        name = yield from cursor.name()
        if not (yield from cursor.accept(">")) or not (wrapped or calls.declared(name)):
            raise NotACallError
        calls.begin(name)
        while True:
            word = yield from cursor.accept("<parameter=", "</function>", "</tool_call>")
            if word is None:
                raise BrokenCallError("")
            if word != "<parameter=":
                break
            yield from self._parameter(cursor, calls)
        calls.end()
        if word == "</function>":
            yield from cursor.accept("</tool_call>")

    def _parameter(self, cursor: Cursor, calls: Calls) -> Reading[None]:
        name, word = yield from cursor.until(">", most=MOST_NAME)
        if word is None:
            raise BrokenCallError("<parameter=" + name)
        value, word = yield from cursor.until("</parameter>", "</tool_call>")
        if word != "</parameter>":
            raise BrokenCallError(f"<parameter={name}>{value}", ended=word is not None)
        calls.parameter(name, without_frame(value))
