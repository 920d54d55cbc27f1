"""Calls as FunctionGemma and Gemma 4 write them: one notation, two sets of words.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>                        Gemma 4
    <start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>         FunctionGemma

Strings stand between quote words and have no escapes, keys are bare or quoted; numbers, true, false, null, lists and
objects are as in JSON. Sources: the chat template of google/gemma-4-31B-it (macro format_argument) and Google's page
"Formatting and best practices" of FunctionGemma.
"""

from __future__ import annotations

import json
import re

from atlas.parsers.calls import Calls, ToolFormat
from atlas.parsers.cursor import Cursor, NotACallError, Reading
from atlas.parsers.json_object import json_member, members

_WORDS = {
    "<|tool_call>": ('<|"|>', "<tool_call|>"),
    "<start_function_call>": ("<escape>", "<end_function_call>"),
}
_BARE = re.compile(r"\s*([\w.$/-]+)\s*(:?)")


class Gemma(ToolFormat):
    opens = tuple(_WORDS)
    ends = tuple(end for _, end in _WORDS.values())
    inner = tuple(quote for quote, _ in _WORDS.values())

    def read(self, cursor: Cursor, calls: Calls, opened: str) -> Reading[None]:
        quote, end = _WORDS[opened]
        if not (yield from cursor.accept("call:")):
            raise NotACallError
        name = yield from cursor.name()
        if not (yield from cursor.accept("{")):
            raise NotACallError
        calls.begin(name)
        yield from members(cursor, calls.member, lambda text: _as_json(text, quote), quote=quote, escapes=False)
        calls.end()
        yield from cursor.accept(end)


def _as_json(member: str, quote: str) -> str | None:
    """A member in JSON, or None. Between quote words is a string; outside of them bare keys need quotes."""
    pieces = member.split(quote)
    for index, piece in enumerate(pieces):
        pieces[index] = json.dumps(piece, ensure_ascii=False) if index % 2 else _BARE.sub(_bare_word, piece)
    return json_member("".join(pieces))


def _bare_word(found: re.Match[str]) -> str:
    if found[2]:
        return f'"{found[1]}": '
    return "null" if found[1] == "None" else found[0]  # the template writes it so
