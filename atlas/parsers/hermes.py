"""Calls as Hermes 2/3, Qwen2.5, Qwen3 and many others write them.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

One object a pair of tags, any number of pairs. Sources: the model cards of NousResearch/Hermes-2-Pro-Llama-3-8B
("Prompt Format for Function Calling") and the chat template of Qwen/Qwen3-8B.
"""

from __future__ import annotations

from atlas.parsers.calls import Calls, ToolFormat
from atlas.parsers.cursor import Cursor, NotACallError, Reading
from atlas.parsers.json_call import read_call


class Hermes(ToolFormat):
    opens = ("<tool_call>",)
    ends = ("</tool_call>",)

    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        if not (yield from cursor.accept("{")):
            raise NotACallError
        yield from read_call(cursor, calls)
        yield from cursor.accept("</tool_call>")
