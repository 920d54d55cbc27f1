"""Token ids in, an answer's events out: what the assembler of plain text is to a completion, for answers in which
reasoning and tool calls are told from content."""

from __future__ import annotations

from collections.abc import Sequence

from atlas.engine.messages import SequenceOutput
from atlas.parsers import AnswerParser, CallEnd, Content, Event
from atlas.text.assembler import Assembler, FinishReason, TextStream
from atlas.text.stop_strings import StopMatcher


class PlainAssembler:
    """An answer that is all content."""

    reasoning_tokens = 0

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler

    @property
    def offsets(self) -> list[int]:
        return self._assembler.offsets

    @property
    def matched(self) -> str | None:
        return self._assembler.matched

    def push(self, output: SequenceOutput) -> tuple[list[Event], int, FinishReason | None]:
        """The new events, how many of the output's ids count, and the reason if this is the end."""
        text, tokens, reason = self._assembler.push(output)
        return [Content(text)] if text else [], tokens, reason


class AnswerAssembler:
    """An answer through a parser. Stop strings are looked for in its content alone: a model that thinks of one, or
    writes one into an argument, has not ended its answer. A call or reasoning in between breaks a match.

    Events, and how many tokens count, depend on the ids alone and not on how they were grouped into outputs.
    """

    def __init__(
        self,
        text_stream: TextStream,
        parser: AnswerParser,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        one_call: bool = False,
    ) -> None:
        """min_tokens, include_stop: as for `Assembler`.  one_call: the first complete call ends the answer."""
        self._stream, self._parser = text_stream, parser
        self._matcher = StopMatcher(stops)
        self._include_stop, self._one_call = include_stop, one_call
        self._tokens_before_stops = min_tokens
        self._length = 0
        self._ended = False
        self.reasoning_tokens = 0
        """Of those that count so far, markers included."""
        self.offsets: list[int] = []
        """For each id counted by the last `push`: characters of the detokenised text before it."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

    def push(self, output: SequenceOutput) -> tuple[list[Event], int, FinishReason | None]:
        """The new events, how many of the output's ids count, and the reason if this is the end."""
        ids, reason = output.token_ids, output.finish_reason
        # The id that ended the sequence counts as generated, but it is no part of the text.
        ended = reason == "stop" and not (output.complete or self._include_stop)
        shown = ids[:-1] if ended else ids
        events: list[Event] = []
        self.offsets = []
        for count, token_id in enumerate(shown, start=1):
            self.offsets.append(self._length)
            self._tokens_before_stops -= 1
            thought = self._parser.thinking
            text = self._stream.push((token_id,))
            if text:
                self._length += len(text)
                self._take(self._parser.feed(text), events)
            self.reasoning_tokens += thought or self._parser.thinking
            if self._ended:
                return events, count, "stop"
        self.offsets += [self._length] * (len(ids) - len(shown))
        if reason is None:
            return events, len(ids), None
        if text := self._stream.finish():
            self._take(self._parser.feed(text), events)
        if not self._ended:
            self._take(self._parser.finish(), events)
        if not self._ended:
            self._release(events)
        return events, len(ids), "stop" if self._ended or reason == "stop" else "length"

    def _take(self, new: list[Event], events: list[Event]) -> None:
        for event in new:
            if self._ended:
                return
            if isinstance(event, Content):
                text = self._matcher.feed(event.text, may_end=self._tokens_before_stops < 0)
                if self._matcher.matched is not None:
                    self._ended = True
                    text += self._matcher.matched if self._include_stop else ""
                if text:
                    events.append(Content(text))
                continue
            self._release(events)
            events.append(event)
            self._ended = self._one_call and isinstance(event, CallEnd) and event.complete

    def _release(self, events: list[Event]) -> None:
        """A stop string that has begun does not go on behind what comes now."""
        if held := self._matcher.finish():
            events.append(Content(held))
