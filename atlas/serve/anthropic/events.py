"""An answer's events as content blocks: piece by piece for a stream, or all of them for a whole message."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from itertools import groupby

import msgspec

from atlas.parsers import Call, CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from atlas.serve.anthropic.answers import (
    Block,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from atlas.serve.anthropic.answers import event as encode
from atlas.serve.openai.frames import Frames

_HIDDEN = "atlas-thinking-"
_SHOWN = "atlas-signature-"


class Signature:
    """What comes with a thinking block and back with the history: the same for the same text, whoever asks.

    It proves nothing, and nothing checks it. Of thinking that the client does not want to see (`display: omitted`) it
    carries the text, so that the model can go on from it.
    """

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden
        self._digest = hashlib.blake2b(digest_size=24)
        self._text: list[str] = []

    def add(self, text: str) -> None:
        """The next piece of the thinking."""
        if self._hidden:
            self._text.append(text)
        else:
            self._digest.update(text.encode(errors="surrogatepass"))

    def value(self) -> str:
        """The signature of all pieces."""
        if self._hidden:
            return _HIDDEN + base64.b64encode("".join(self._text).encode(errors="surrogatepass")).decode()
        return _SHOWN + base64.b64encode(self._digest.digest()).decode()


def hidden_thinking(signature: str) -> str:
    """The thinking that a signature carries; none where it is that of another server, or damaged."""
    if not signature.startswith(_HIDDEN):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_HIDDEN), validate=True).decode()
    except ValueError:
        return ""


def blocks(events: Iterable[Event], *, hide_thinking: bool = False) -> list[Block]:
    """The content of a whole message, of all events of its answer."""
    result: list[Block] = []
    call: Call | None = None
    for kind, group in groupby((event for event in events if not _says_nothing(event)), type):
        if kind is Content:
            result.append(TextBlock("".join(event.text for event in group if isinstance(event, Content))))
        elif kind is Reasoning:
            text = "".join(event.text for event in group if isinstance(event, Reasoning))
            signature = Signature(hidden=hide_thinking)
            signature.add(text)
            result.append(ThinkingBlock("" if hide_thinking else text, signature.value()))
        else:
            for event in group:
                match event:
                    case CallBegin():
                        call = Call(event.id, event.name)
                    case CallArguments() if call is not None:
                        call.arguments += event.text
                    case CallEnd() if call is not None:
                        call.complete = event.complete
                        result.append(ToolUseBlock(call.id, call.name, _input(call)))
    return result


def _says_nothing(event: Event) -> bool:
    return isinstance(event, Content | Reasoning | CallArguments) and not event.text


def _input(call: Call) -> msgspec.Raw:
    """The arguments of a call as an object. Those of one that was broken off are those that are whole, which is also
    what the official client makes of them in a stream."""
    text = call.arguments if call.complete else (call.arguments or "{") + "}"
    return msgspec.Raw(text.encode())


class BlockWriter:
    """The bytes of a stream's content."""

    def __init__(self, *, hide_thinking: bool = False) -> None:
        self._hide = hide_thinking
        self._index = -1
        self._open: type[Content] | type[Reasoning] | type[CallBegin] | None = None
        self._signature = Signature(hidden=hide_thinking)
        self._deltas = Frames(self._delta)

    def feed(self, events: Iterable[Event]) -> bytes:
        """What the answer's next events make; nothing where they tell the client nothing."""
        parts: list[bytes] = []
        for event in events:
            if _says_nothing(event):
                continue
            match event:
                case Content():
                    if self._open is not Content:
                        self._begin(Content, TextBlock(""), parts)
                    parts.append(self._deltas.of(event))
                case Reasoning(text):
                    if self._open is not Reasoning:
                        self._begin(Reasoning, ThinkingBlock("", ""), parts)
                        self._signature = Signature(hidden=self._hide)
                    self._signature.add(text)
                    if not self._hide:
                        parts.append(self._deltas.of(event))
                case CallBegin(_, identifier, name):
                    self._begin(CallBegin, ToolUseBlock(identifier, name, msgspec.Raw(b"{}")), parts)
                case CallArguments():
                    parts.append(self._deltas.of(event))
                case CallEnd():
                    self._end(parts)
        return b"".join(parts)

    def finish(self) -> bytes:
        """The end of the block that is open."""
        parts: list[bytes] = []
        self._end(parts)
        return b"".join(parts)

    def _begin(self, kind: type[Content] | type[Reasoning] | type[CallBegin], block: Block, parts: list[bytes]) -> None:
        self._end(parts)
        self._index += 1
        self._open = kind
        self._deltas = Frames(self._delta)
        parts.append(encode(ContentBlockStart(self._index, block)))

    def _end(self, parts: list[bytes]) -> None:
        if self._open is None:
            return
        if self._open is Reasoning:
            parts.append(encode(ContentBlockDelta(self._index, SignatureDelta(self._signature.value()))))
        parts.append(encode(ContentBlockStop(self._index)))
        self._open = None

    def _delta(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return encode(ContentBlockDelta(self._index, TextDelta(text)))
            case Reasoning(text):
                return encode(ContentBlockDelta(self._index, ThinkingDelta(text)))
            case CallArguments(_, text):
                return encode(ContentBlockDelta(self._index, InputJsonDelta(text)))
        raise TypeError(f"{event} is no delta")


class Calls:
    """Whether the calls of an answer may be made."""

    def __init__(self) -> None:
        self._begun = self._complete = 0

    def feed(self, events: Iterable[Event]) -> None:
        """The answer's next events."""
        for event in events:
            if isinstance(event, CallBegin):
                self._begun += 1
            elif isinstance(event, CallEnd):
                self._complete += event.complete

    def stop_reason(self, finish_reason: str, stop: str | None, *, context_is_full: bool) -> StopReason:
        """`tool_use` only if every call is complete: clients then make all that stand in the message.

        finish_reason: of generation.  stop: the stop sequence that ended it.
        context_is_full: fewer tokens than `max_tokens` were possible.
        """
        if finish_reason == "length":
            return "model_context_window_exceeded" if context_is_full else "max_tokens"
        if stop is not None:
            return "stop_sequence"
        return "tool_use" if self._begun and self._begun == self._complete else "end_turn"
