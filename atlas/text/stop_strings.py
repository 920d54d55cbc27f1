"""Finds stop strings in text that arrives in pieces, and never lets a part of one out.

One Knuth-Morris-Pratt automaton per stop: its state is the length of the longest prefix of the stop that the
text so far ends with. That makes the answer a function of the characters alone, so any split of the text
gives the same result as the whole of it at once.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Incremental matcher for a set of stop strings.

    The match is the one that *ends* first; of those that end on the same character, the longest. Text before
    it is released, nothing after it. Without stops, everything passes straight through.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        # Longest first, so that the first automaton to complete on a character is the one to report.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failure(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Take the next piece; return what may be shown now. After a match, always the empty string.

        may_end: False where a stop that is completed by this piece is text like any other.
        """
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                state = self._states[index]
                while state and stop[state] != character:
                    state = self._failures[index][state]
                state += stop[state] == character
                if state == len(stop) and not may_end:
                    state = self._failures[index][state]
                elif state == len(stop):
                    self.matched, self._held = stop, ""
                    return buffer[: position - state]
                self._states[index] = state
        keep = len(buffer) - max(self._states)
        self._held = buffer[keep:]
        return buffer[:keep]

    def finish(self) -> str:
        """The text has ended, or is interrupted: what was held back can no longer become a stop."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held


def _failure(stop: str) -> list[int]:
    """failure[n]: length of the longest proper prefix of stop[:n] that is also its suffix."""
    failure = [0, 0]
    for position in range(1, len(stop)):
        state = failure[position]
        while state and stop[state] != stop[position]:
            state = failure[state]
        failure.append(state + (stop[state] == stop[position]))
    return failure
