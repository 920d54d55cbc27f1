"""An answer's text taken apart: content, reasoning and tool calls, as it comes or in one piece."""

from __future__ import annotations

from collections.abc import Callable

from atlas.parsers.calls import Calls, ToolFormat, Tools
from atlas.parsers.cursor import MOST_SPACE, SPACE, Cursor, NotACallError, Reading
from atlas.parsers.events import Content, Event, Reasoning, joined
from atlas.parsers.reasoning import Markers

MOST_REST = 64 << 10
"""Characters of a broken call that its last event reports."""


class AnswerParser:
    """Feed it the text of one answer in any pieces; the events, joined, depend on the whole text alone.

    A call is found wherever its format may stand, inside reasoning as well: what follows it is reasoning still.
    What is not a call stays text as it is, but for two things that belong to the formats: white space beside markers
    of reasoning, and white space around calls where no text follows.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        tools: Tools | None = None,
        markers: Markers | None = None,
        *,
        inside: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """tool_format: how the model writes calls; None if it may make none.  tools: those of the request.
        markers: around reasoning; None if there is none.  inside: the answer begins inside of them.
        new_id: makes the calls' ids, instead of the format's own way.
        """
        self._format = tool_format
        self._markers = markers
        self.thinking = inside and markers is not None
        """Whether what was fed last belongs to reasoning, as far as that is decided."""
        self._events: list[Event] = []
        self._cursor = Cursor()
        make_id = new_id or (tool_format.new_id if tool_format else str)
        self._calls = Calls(tools or {}, self._cursor, self._events, make_id)
        self._text = _Text(self._events)
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[Event]:
        """The events that the next piece of text decides."""
        if self._cursor.ended:
            raise ValueError("this answer has been finished")
        self._cursor.push(text)
        next(self._reading)
        return self._taken()

    def finish(self) -> list[Event]:
        """The events that only the end of the text decides."""
        self._cursor.end()
        next(self._reading, None)
        return self._taken()

    @property
    def unread(self) -> int:
        """Characters held back until it is decided what they are; those of an argument that is read do not count."""
        return self._cursor.unread

    def _taken(self) -> list[Event]:
        events = joined(self._events)
        self._events.clear()
        return events

    def _read(self) -> Reading[None]:
        cursor = self._cursor
        start, end = (self._markers.start, self._markers.end) if self._markers else ("", "")
        opens, bare = (self._format.opens, self._format.bare) if self._format else ((), ())
        reasoned = self.thinking
        if reasoned:
            self._text.part(Reasoning)
        while True:
            # Where a part begins, markers count that are text elsewhere.
            words = () if self.thinking else bare
            if start:
                words += (start, end) if reasoned and not self.thinking else (start,)
            cursor.keep()
            word = (yield from cursor.accept(*words)) if words else None
            if word is not None and word in bare:
                yield from self._call(word)
            elif word is not None:
                # A closing marker here is the second: the model's own after one that was forced.
                if word == start:
                    reasoned = self.thinking = True
                    self._text.part(Reasoning)
                continue
            cursor.drop()
            while True:
                word = yield from cursor.flow((*opens, end) if self.thinking else opens, self._text.add)
                if word is None:
                    self._text.close()
                    return
                if self.thinking and word == end:
                    break
                cursor.keep(word)
                yield from self._call(word)
            self.thinking = False
            self._text.part(Content)

    def _call(self, opened: str) -> Reading[None]:
        """Read what may be a call. What turns out to be none is text, and is not looked through again."""
        assert self._format is not None
        self._text.pause()
        try:
            yield from self._format.read(self._cursor, self._calls, opened)
        except NotACallError as error:
            if self._calls.open:
                rest = [error.rest]
                if not error.ended:
                    yield from self._skip(self._format.ends, rest)
                self._calls.cut("".join(rest)[:MOST_REST])
            else:
                kept = self._cursor.kept()
                self._text.add(error.rest if kept is None else kept)
        self._cursor.drop()

    def _skip(self, ends: tuple[str, ...], rest: list[str]) -> Reading[None]:
        left = MOST_REST

        def out(text: str) -> None:
            nonlocal left
            rest.append(text[:left])
            left -= len(rest[-1])

        yield from self._cursor.flow(ends, out)


class _Text:
    """Text between calls and markers. White space is held until it is known what follows."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._kind: type[Content] | type[Reasoning] = Content
        self._gap = ""
        self._passing = False  # in white space too long to be held
        self._strip = False  # nothing but white space since a marker
        self._called = False  # nothing but white space since a call

    def part(self, kind: type[Content] | type[Reasoning]) -> None:
        """A marker of reasoning was read: the white space on both sides of it is its own."""
        self._kind, self._gap, self._strip, self._passing, self._called = kind, "", True, False, False

    def pause(self) -> None:
        """A call may follow."""
        self._called = True

    def add(self, text: str) -> None:
        if self._strip:
            text = text.lstrip(SPACE)
        body = text.rstrip(SPACE)
        if body:
            self._events.append(self._kind(self._gap + body))
            self._gap, self._strip, self._passing, self._called = "", False, False, False
        space = text[len(body) :]
        if self._passing and space:
            self._events.append(self._kind(space))
        else:
            self._gap += space
        if len(self._gap) > MOST_SPACE:
            self._events.append(self._kind(self._gap))
            self._gap, self._passing = "", True

    def close(self) -> None:
        """The answer ends here."""
        if self._gap and self._kind is Content and not self._called:
            self._events.append(Content(self._gap))
        self._gap = ""
