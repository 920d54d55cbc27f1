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

    def __init__(self, text_stream: TextStream, stops: Sequence[str]) -> None:
        self._stream = text_stream
        self._matcher = StopMatcher(stops)
        self._one_by_one = bool(stops)

    def push(self, output: SequenceOutput) -> tuple[str, int, FinishReason | None]:
        """The new text, how many of the output's ids count, and the reason if this is the end."""
        ids, reason = output.token_ids, output.finish_reason
        # The id that ended the sequence counts as generated, but it is no part of the text.
        shown = ids[:-1] if reason == "stop" else ids
        text = ""
        # With stop strings, ids after the one that completes the match must not be counted.
        groups = [[token] for token in shown] if self._one_by_one else [shown]
        for count, group in enumerate(groups, start=1):
            text += self._matcher.feed(self._stream.push(group))
            if self._matcher.matched is not None:
                return text, count, "stop"
        if reason is None:
            return text, len(ids), None
        text += self._matcher.feed(self._stream.finish())
        matched = self._matcher.matched is not None
        text += self._matcher.finish()
        return text, len(ids), "stop" if matched or reason == "stop" else "length"
