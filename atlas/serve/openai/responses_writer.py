"""A response as it comes into being: its items one after another, as events and as the object that they add up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from atlas import parsers
from atlas.serve.openai.response_events import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    StreamEvent,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryTextDelta,
    SummaryTextDone,
)
from atlas.serve.openai.responses_items import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
    new_id,
    seal,
)
from atlas.serve.openai.responses_objects import IncompleteDetails, ResponseError, ResponseObject, ResponseUsage


class _Place:
    """Where in the output an item stands, and where its events go."""

    def __init__(self, writer: ResponseWriter, index: int, kind: type[OutputItem]) -> None:
        self._writer, self._index, self.id = writer, index, new_id(kind)

    def say(self, kind: Callable[..., StreamEvent], **fields: Any) -> None:
        """An event inside the item."""
        self._writer.say(kind, output_index=self._index, item_id=self.id, **fields)

    def added(self, item: OutputItem) -> None:
        self._writer.say(OutputItemAdded, output_index=self._index, item=item)

    def done(self, item: OutputItem) -> None:
        self._writer.say(OutputItemDone, output_index=self._index, item=item)


class _Message:
    """A message that is being written."""

    def __init__(self, at: _Place) -> None:
        self._at, self._pieces = at, list[str]()
        self._logprobs: list[Any] = []
        at.added(MessageItem(id=at.id, status="in_progress", role="assistant", content=[]))
        at.say(ContentPartAdded, part=OutputText(""))

    def delta(self, text: str, logprobs: list[Any]) -> None:
        self._pieces.append(text)
        self._logprobs += logprobs
        self._at.say(OutputTextDelta, delta=text, logprobs=logprobs)

    def end(self, status: ItemStatus) -> MessageItem:
        item, text = self.item(status), "".join(self._pieces)
        self._at.say(OutputTextDone, text=text, logprobs=self._logprobs)
        self._at.say(ContentPartDone, part=OutputText(text, [], self._logprobs))
        self._at.done(item)
        return item

    def item(self, status: ItemStatus) -> MessageItem:
        part = OutputText("".join(self._pieces), [], self._logprobs)
        return MessageItem(id=self._at.id, status=status, role="assistant", content=[part])


class _Reasoning:
    """Reasoning that is being written, as the item's content."""

    def __init__(self, at: _Place, *, sealed: bool) -> None:
        self._at, self._sealed, self._pieces = at, sealed, list[str]()
        self._begin()

    def _begin(self) -> None:
        self._at.added(ReasoningItem(id=self._at.id, status="in_progress", summary=[], content=[]))
        self._at.say(ContentPartAdded, part=ReasoningText(""))

    def delta(self, text: str) -> None:
        self._pieces.append(text)
        self._at.say(ReasoningTextDelta, delta=text)

    def end(self, status: ItemStatus) -> ReasoningItem:
        item, text = self.item(status), "".join(self._pieces)
        self._at.say(ReasoningTextDone, text=text)
        self._at.say(ContentPartDone, part=ReasoningText(text))
        self._at.done(item)
        return item

    def item(self, status: ItemStatus) -> ReasoningItem:
        text = "".join(self._pieces)
        return self._seal(ReasoningItem(id=self._at.id, status=status, content=[ReasoningText(text)]), text)

    def _seal(self, item: ReasoningItem, text: str) -> ReasoningItem:
        return msgspec.structs.replace(item, encrypted_content=seal(text)) if self._sealed else item


class _Summary(_Reasoning):
    """Reasoning that is being written, as the item's summary."""

    def _begin(self) -> None:
        self._at.added(ReasoningItem(id=self._at.id, status="in_progress", summary=[]))
        self._at.say(SummaryPartAdded, part=SummaryText(""))

    def delta(self, text: str) -> None:
        self._pieces.append(text)
        self._at.say(SummaryTextDelta, delta=text)

    def end(self, status: ItemStatus) -> ReasoningItem:
        item, text = self.item(status), "".join(self._pieces)
        self._at.say(SummaryTextDone, text=text)
        self._at.say(SummaryPartDone, part=SummaryText(text))
        self._at.done(item)
        return item

    def item(self, status: ItemStatus) -> ReasoningItem:
        text = "".join(self._pieces)
        return self._seal(ReasoningItem(id=self._at.id, status=status, summary=[SummaryText(text)]), text)


class _Call:
    """A call that is being written. apart: namespace and name, by what the model calls functions that have both."""

    def __init__(self, at: _Place, begin: parsers.CallBegin, apart: Mapping[str, tuple[str, str]]) -> None:
        self._at, self._call_id, self._pieces = at, begin.id, list[str]()
        self._namespace: str | UnsetType
        self._namespace, self._name = apart.get(begin.name, (UNSET, begin.name))
        at.added(self.item("in_progress"))

    def delta(self, text: str) -> None:
        self._pieces.append(text)
        self._at.say(ArgumentsDelta, delta=text)

    def end(self, status: ItemStatus) -> FunctionCallItem:
        item = self.item(status)
        self._at.say(ArgumentsDone, name=self._name, arguments=item.arguments)
        self._at.done(item)
        return item

    def item(self, status: ItemStatus) -> FunctionCallItem:
        arguments = "".join(self._pieces)
        return FunctionCallItem(
            id=self._at.id,
            status=status,
            call_id=self._call_id,
            name=self._name,
            arguments=arguments,
            namespace=self._namespace,
        )


class ResponseWriter:
    """Words what a parser tells as the events of a response: each method returns those that it makes.

    The response is the same however the answer was cut into deltas, but for its ids.
    """

    def __init__(
        self,
        response: ResponseObject,
        *,
        summary: bool = False,
        sealed: bool = False,
        apart: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """response: without output yet.  summary: reasoning goes into the summary.  sealed: and stands in
        `encrypted_content` as well.  apart: `responses_tools.names_apart`."""
        self.response, self._apart = response, apart or {}
        self._summary, self._sealed = summary, sealed
        self._said: list[StreamEvent] = []
        self._number = 0
        self._output: list[OutputItem] = []
        self._open: _Message | _Reasoning | _Call | None = None
        self._logprobs: list[Any] = []  # of tokens whose text is not known to be content yet

    def say(self, kind: Callable[..., StreamEvent], **fields: Any) -> None:
        """One more event."""
        self._said.append(kind(sequence_number=self._number, **fields))
        self._number += 1

    def begin(self, *, queued: bool = False) -> list[StreamEvent]:
        """The first event; of a response that waits, a second."""
        self.say(ResponseCreated, response=self.response)
        if queued:
            self.say(ResponseQueued, response=self.response)
        return self._taken()

    def start(self) -> list[StreamEvent]:
        """It is being made from now on."""
        self.response = msgspec.structs.replace(self.response, status="in_progress")
        self.say(ResponseInProgress, response=self.response)
        return self._taken()

    def add(self, events: Sequence[parsers.Event], logprobs: Sequence[Any] = ()) -> list[StreamEvent]:
        """What a delta of the answer says. logprobs: of its tokens. A parser may hold text back, so they go to the
        next content; those of reasoning and calls are dropped, the API has no place for them."""
        self._logprobs += logprobs
        if self._logprobs and events and not any(isinstance(event, parsers.Content) for event in events):
            self._logprobs = []
        for event in events:
            self._add(event)
        return self._taken()

    def complete(self, usage: ResponseUsage, *, cut: bool) -> list[StreamEvent]:
        """The last events. cut: by max_output_tokens."""
        status: Literal["incomplete", "completed"] = "incomplete" if cut else "completed"
        if not cut and not any(isinstance(item, MessageItem | FunctionCallItem) for item in self._items("completed")):
            self._message()
        if isinstance(self._open, _Message) and self._logprobs:  # of the end token
            self._open.delta("", self._logprobs)
        self._close(status)
        self._end(status, usage=usage, incomplete_details=IncompleteDetails("max_output_tokens") if cut else None)
        self.say(ResponseIncomplete if cut else ResponseCompleted, response=self.response)
        return self._taken()

    def fail(self, error: ResponseError) -> list[StreamEvent]:
        """The last event of a response that breaks."""
        self._end("failed", error=error)
        self.say(ResponseFailed, response=self.response)
        return self._taken()

    def cancel(self) -> list[StreamEvent]:
        """The last event of a response that is cancelled. The API has none for it: its object says so."""
        self._end("cancelled")
        self.say(ResponseIncomplete, response=self.response)
        return self._taken()

    def _add(self, event: parsers.Event) -> None:
        match event:
            case parsers.Content():
                logprobs, self._logprobs = self._logprobs, []
                self._message().delta(event.text, logprobs)
            case parsers.Reasoning():
                self._reasoning().delta(event.text)
            case parsers.CallBegin():
                self._close("completed")
                self._open = _Call(self._place(FunctionCallItem), event, self._apart)
            case parsers.CallArguments():
                assert isinstance(self._open, _Call)
                self._open.delta(event.text)
            case parsers.CallEnd():
                self._close("completed" if event.complete else "incomplete")

    def _message(self) -> _Message:
        """The message that is open now."""
        if not isinstance(self._open, _Message):
            self._close("completed")
            self._open = _Message(self._place(MessageItem))
        return self._open

    def _reasoning(self) -> _Reasoning:
        """The reasoning that is open now."""
        if not isinstance(self._open, _Reasoning):
            self._close("completed")
            kind = _Summary if self._summary else _Reasoning
            self._open = kind(self._place(ReasoningItem), sealed=self._sealed)
        return self._open

    def _place(self, kind: type[OutputItem]) -> _Place:
        return _Place(self, len(self._output), kind)

    def _close(self, status: ItemStatus) -> None:
        if self._open is not None:
            self._output.append(self._open.end(status))
            self._open = None

    def _items(self, status: ItemStatus) -> list[OutputItem]:
        return self._output + ([] if self._open is None else [self._open.item(status)])

    def _end(self, status: Literal["completed", "incomplete", "failed", "cancelled"], **changes: Any) -> None:
        output = self._items("incomplete")
        if status == "completed":
            changes["completed_at"] = int(time.time())
        self.response = msgspec.structs.replace(self.response, status=status, output=output, **changes)

    def _taken(self) -> list[StreamEvent]:
        said, self._said = self._said, []
        return said
