"""Calls as Llama 3.1, 3.2 and 3.3 write them: the answer is a JSON object, or several with `;` between.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

`<|python_tag|>` may stand before it. As nothing else tells a call from an answer in JSON, an object is a call only
where the content begins, and only if it names a tool of the request. Source: Meta's page "Llama 3.1 - Model Cards &
Prompt Formats", section "JSON based tool calling", and the chat template of meta-llama/Llama-3.1-8B-Instruct.
Calls of the built-in tools (`<|python_tag|>brave_search.call(query="...")`) are left as text.
"""

from __future__ import annotations

from atlas.parsers.calls import Calls, ToolFormat
from atlas.parsers.cursor import Cursor, NotACallError, Reading
from atlas.parsers.json_call import read_call


class Llama3Json(ToolFormat):
    bare = ("<|python_tag|>", "{")

    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        if opened != "{" and not (yield from cursor.accept("{")):
            raise NotACallError
        while True:
            yield from read_call(cursor, calls, only_declared=True)
            cursor.keep()
            if not (yield from cursor.accept(";")):
                return
            if not (yield from cursor.accept("{")):
                raise NotACallError
