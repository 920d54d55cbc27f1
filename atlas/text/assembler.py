"""Token ids in, finished text out: detokenised as they come, cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from atlas.engine.messages import SequenceOutput
from atlas.text.stop_strings import StopMatcher

FinishReason = Literal["stop", "length"]


class TextStream(Protocol):
    """An incremental detokenizer: ids in, the text that has become complete out."""

    def push(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Assembler:
    """The text of one sequence: detokenised, cut at a stop string.

    Which text comes out, and how many tokens count, depends on the ids alone and not on how they were
    grouped into outputs; a streamed answer therefore equals the same answer in one piece.
    """

    def __init__(
        self,
        text_stream: TextStream,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        offsets: bool = False,
    ) -> None:
        """min_tokens: a stop string that is complete after so many tokens, or earlier, ends nothing.
        include_stop: the stop string, and the text of a stop token if it has one, stay in the text.
        offsets: keep `offsets`."""
        self._stream = text_stream
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop
        self._one_by_one = bool(stops) or offsets
        self._tokens_before_stops = min_tokens
        self._length = 0
        self.offsets: list[int] = []
        """For each id counted by the last `push`: characters of the detokenised text before it."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched

    def push(self, output: SequenceOutput) -> tuple[str, int, FinishReason | None]:
        """The new text, how many of the output's ids count, and the reason if this is the end."""
        ids, reason = output.token_ids, output.finish_reason
        if reason is None and not self._one_by_one:  # nearly all of them
            return self._stream.push(ids), len(ids), None
        # The id that ended the sequence counts as generated, but it is no part of the text.
        ended = reason == "stop" and not (output.complete or self._include_stop)
        shown = ids[:-1] if ended else ids
        text = ""
        self.offsets = []
        # With stop strings, ids after the one that completes the match must not be counted.
        groups = [[token] for token in shown] if self._one_by_one else [shown]
        for count, group in enumerate(groups, start=1):
            self.offsets.append(self._length)
            self._tokens_before_stops -= len(group)
            text += self._feed(self._stream.push(group))
            if self._matcher.matched is not None:
                return text, count, "stop"
        self.offsets += [self._length] * (len(ids) - len(shown))
        if reason is None:
            return text, len(ids), None
        text += self._feed(self._stream.finish())
        matched = self._matcher.matched is not None
        text += self._matcher.finish()
        return text, len(ids), "stop" if matched or reason == "stop" else "length"

    def _feed(self, piece: str) -> str:
        """What may be shown once `piece` is there, up to a stop string."""
        self._length += len(piece)
        shown = self._matcher.feed(piece, may_end=self._tokens_before_stops < 0)
        return shown + (self._matcher.matched or "") if self._include_stop else shown
