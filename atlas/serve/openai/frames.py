"""Chunks of a stream, most of which differ in one text only."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from atlas.parsers import CallArguments, Content, Event, Reasoning

_encode = msgspec.json.Encoder().encode


class Frames:
    """The bytes of events of one choice.

    Those of the first event of a kind are made with a text that stands nowhere else, and cut there; then the text of
    every other one goes between the two parts. It is the same JSON at a tenth of the time, and done for every token.
    """

    def __init__(self, word: Callable[[Event], bytes]) -> None:
        """word: the bytes that stand for one event."""
        self._word = word
        self._around: dict[tuple[type[Event], int], tuple[bytes, bytes]] = {}

    def of(self, event: Event) -> bytes:
        if not isinstance(event, Content | Reasoning | CallArguments):
            return self._word(event)
        key = type(event), event.index if isinstance(event, CallArguments) else 0
        if (around := self._around.get(key)) is None:
            around = self._around[key] = self._cut(event)
        return around[0] + _encode(event.text) + around[1]

    def _cut(self, event: Content | Reasoning | CallArguments) -> tuple[bytes, bytes]:
        text = secrets.token_hex(16)
        before, after = self._word(msgspec.structs.replace(event, text=text)).split(_encode(text))
        return before, after
