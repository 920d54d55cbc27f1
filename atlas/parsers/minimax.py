"""Calls as MiniMax-M2, M2.1 and M2.5 write them.

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>

Any number of calls in one outer tag. Strings stand as they are, other values as JSON; which of both the tool's
schema says. Source: docs/tool_calling_guide.md of MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from atlas.parsers.calls import Calls, ToolFormat
from atlas.parsers.cursor import Cursor, Reading
from atlas.parsers.typeless import read_invokes


class MiniMax(ToolFormat):
    opens = ("<minimax:tool_call>",)
    ends = ("</minimax:tool_call>",)

    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        yield from read_invokes(cursor, calls, "", "</minimax:tool_call>")
