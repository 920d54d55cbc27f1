"""What a parser tells about an answer, piece by piece, and the same answer in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text the model wrote for itself."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call whose name is known. index: its place among the answer's calls, from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments, JSON text. It ends where an argument ends, never inside one."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The last event of a call.

    complete: all of it was there, and its arguments are a JSON object. Otherwise they stop after the last whole
        argument without the closing brace: text that no client can take for a call to be made.
    rest: of a call that is not complete, what the model wrote after that (the beginning of it, if it is long).
    """

    index: int
    complete: bool = True
    rest: str = ""


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events, with neighbours of one kind made one."""
    result: list[Event] = []
    for _, group in groupby(events, type):
        pieces = list(group)
        first = pieces[0]
        text = "".join(piece.text for piece in pieces if not isinstance(piece, CallBegin | CallEnd))
        if isinstance(first, Content | Reasoning):
            result.append(type(first)(text))
        elif isinstance(first, CallArguments):  # of one call: between those of two stand an end and a beginning
            result.append(CallArguments(first.index, text))
        else:
            result += pieces
    return result


class Call(msgspec.Struct):
    """One call of a whole answer."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False
    rest: str = ""


class Answer(msgspec.Struct):
    """All events of an answer together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = []


def collect(events: Iterable[Event]) -> Answer:
    """The answer that these events, all of them, make."""
    answer = Answer()
    content, reasoning = [], []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content():
                content.append(event.text)
            case Reasoning():
                reasoning.append(event.text)
            case CallBegin():
                answer.calls.append(Call(event.id, event.name))
                arguments.append([])
            case CallArguments():
                arguments[event.index].append(event.text)
            case CallEnd():
                call = answer.calls[event.index]
                call.complete, call.rest = event.complete, event.rest
    answer.content, answer.reasoning = "".join(content), "".join(reasoning)
    for call, pieces in zip(answer.calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return answer
