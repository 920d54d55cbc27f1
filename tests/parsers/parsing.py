"""Runs a parser over a text in pieces, and the cases that all tests of parsers share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from atlas.parsers import MARKERS, TOOL_FORMATS, AnswerParser, Event, collect
from atlas.parsers.events import joined

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": STRING, "days": INTEGER}},
    "write_file": {"type": "object", "properties": {"path": STRING, "content": STRING}},
    "f": {"type": "object", "properties": {"ä": INTEGER, "list": {"type": "array"}, "map": {"type": "object"}}},
    "now": {"type": "object", "properties": {}},
}


def parser_of(format_name: str = "", markers: str = "", *, inside: bool = False) -> AnswerParser:
    """A parser for `TOOLS` whose calls are numbered; no name: no calls, no reasoning."""
    counter = itertools.count()
    return AnswerParser(
        TOOL_FORMATS[format_name] if format_name else None,
        TOOLS,
        MARKERS[markers] if markers else None,
        inside=inside,
        new_id=lambda: f"id{next(counter)}",
    )


def events_of(pieces: Iterable[str], format_name: str = "", markers: str = "", *, inside: bool = False) -> list[Event]:
    """All events, those next to each other joined."""
    parser = parser_of(format_name, markers, inside=inside)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return joined(events + parser.finish())


@dataclass(frozen=True)
class Case:
    """A text and what is in it. calls: name and arguments; `cut`: the last of them is not complete."""

    title: str
    format: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    markers: str = ""
    inside: bool = False
    cut: bool = False
    rest: str = ""
    ids: tuple[str, ...] = field(default=())

    def events(self, pieces: Iterable[str]) -> list[Event]:
        return events_of(pieces, self.format, self.markers, inside=self.inside)

    def check(self) -> None:
        answer = collect(self.events([self.text]))
        assert answer.content == self.content
        assert answer.reasoning == self.reasoning
        assert tuple((call.name, call.arguments) for call in answer.calls) == self.calls
        complete = [True] * len(self.calls)
        if self.cut:
            complete[-1] = False
        assert [call.complete for call in answer.calls] == complete
        assert (answer.calls[-1].rest if answer.calls else "") == self.rest
        if self.ids:
            assert tuple(call.id for call in answer.calls) == self.ids
