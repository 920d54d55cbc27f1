"""Reading text that arrives in pieces as if all of it were there.

A reader is a generator: it asks a `Cursor` for what comes next and, where that is not decided yet, yields until
more text has been pushed. Every step is defined by the text alone and never by where the pieces end, so a reader
gives the same for any split. The cursor holds back only what may still become a word that is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

SPACE = " \t\r\n"
MOST_SPACE = 256
"""White space that may stand between two words of a format."""

MOST_HELD = 4 << 20
"""Characters of one argument: more than the text of a million tokens in any language."""

MOST_NAME = 256
"""Characters of a tool's or a parameter's name."""

_SPACES = re.compile(f"[{SPACE}]*")
_NAME = re.compile(r"[\w.:/@+-]*")


def is_name(text: str) -> bool:
    """Whether a tool may have this name."""
    return 0 < len(text) <= MOST_NAME and _NAME.fullmatch(text) is not None


class NotACallError(Exception):
    """What began like a call is none: it is text like any other."""

    rest = ""
    ended = False


class BrokenCallError(NotACallError):
    """A call that cannot be read further; if not even its name was there, it is no call.

    rest: what was read since the last whole argument.  ended: the word that ends a call of this format was read.
    """

    def __init__(self, rest: str, *, ended: bool = False) -> None:
        super().__init__(rest[:100])
        self.rest = rest
        self.ended = ended


@lru_cache(maxsize=256)
def _search(words: tuple[str, ...]) -> tuple[re.Pattern[str], int, frozenset[str]]:
    """What finds the words, the length of the longest, and their first characters."""
    inside = [(a, b) for a in words for b in words if a != b and a in b]
    if inside:  # which of the two is found would depend on how much text is there
        raise ValueError(f"words looked for together must not contain each other: {inside}")
    pattern = re.compile("|".join(map(re.escape, words)) if words else r"(?!)")
    return pattern, max(map(len, words), default=1), frozenset(word[0] for word in words)


def _find(text: str, start: int, words: tuple[str, ...]) -> tuple[int, int | None]:
    """Where the first word begins and ends. No word: where the longest end of the text begins that could become one."""
    pattern, longest, firsts = _search(words)
    if match := pattern.search(text, start):
        return match.span()
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if text[at] in firsts and any(word.startswith(text[at:]) for word in words):
            return at, None
    return len(text), None


class Cursor:
    """A position in a text of which the end is still to come."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.ended = False
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def unread(self) -> int:
        """Characters that are held back, as what they are is not decided yet."""
        return len(self._text) - self._at

    def end(self) -> None:
        """No more text will come."""
        self.ended = True

    def keep(self, text: str = "") -> None:
        """Remember what is read from here on, after `text`: should it turn out to be no call, it is given back."""
        self._kept = [text]

    def drop(self) -> None:
        self._kept = None

    def kept(self) -> str | None:
        return None if self._kept is None else "".join(self._kept)

    def accept(self, *words: str) -> Reading[str | None]:
        """Read one of the words, and white space before it. None, and nothing read, if something else comes."""
        longest = max(map(len, words))
        while True:
            at = _SPACES.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches anywhere
            if at - self._at > MOST_SPACE:
                return None
            coming = self._text[at : at + longest]
            for word in words:
                if coming.startswith(word):
                    self._take(at + len(word))
                    return word
            if not any(word.startswith(coming) for word in words) or not (yield from self._more()):
                return None

    def name(self) -> Reading[str]:
        """Read a name, and white space before it. Nothing is read, and the name is empty, if something else comes."""
        while True:
            at = _SPACES.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches anywhere
            stop = _NAME.match(self._text, at).end()  # type: ignore[union-attr]
            if at - self._at > MOST_SPACE or stop - at > MOST_NAME:
                return ""
            if stop < len(self._text) or not (yield from self._more()):
                return self._take(stop).lstrip(SPACE) if stop > at else ""

    def character(self) -> Reading[str]:
        """The next character, or nothing at the end."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._take(self._at + 1)

    def flow(self, words: tuple[str, ...], out: Callable[[str], None]) -> Reading[str | None]:
        """Hand out the text up to one of the words as it comes, and read the word. None: the end came first."""
        while True:
            stop, end = _find(self._text, self._at, words)
            if stop > self._at:
                out(self._take(stop))
            if end is not None:
                return self._take(end)
            if not (yield from self._more()):
                if self._at < len(self._text):
                    out(self._take(len(self._text)))
                return None

    def until(self, *words: str, most: int = MOST_HELD) -> Reading[tuple[str, str | None]]:
        """The text up to one of the words, and the word, which is read too; None if the end comes first.

        Raises BrokenCallError if the text is longer than `most`.
        """
        pieces: list[str] = []
        left = most
        while True:
            stop, end = _find(self._text, self._at, words)
            if stop - self._at > left:
                pieces.append(self._take(self._at + left))
                raise BrokenCallError("".join(pieces))
            left -= stop - self._at
            pieces.append(self._take(stop))
            if end is not None:
                return "".join(pieces), self._take(end)
            if not (yield from self._more()):
                pieces.append(self._take(len(self._text)))
                return "".join(pieces), None

    def _take(self, stop: int) -> str:
        piece = self._text[self._at : stop]
        self._at = stop
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def _more(self) -> Reading[bool]:
        if self.ended:
            return False
        yield
        return True
