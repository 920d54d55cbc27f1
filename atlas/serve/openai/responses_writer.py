"""A response as it comes into being: its items one after another, as events and as the object that they add up to."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal

import msgspec

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

Ending = Generator[StreamEvent, None, OutputItem]
"""The last events of an item, and the item."""


class _Message:
    """A message that is being written."""

    def __init__(self, at: _Place) -> None:
        self._at, self._pieces = at, list[str]()
        self._logprobs: list[Any] = []

    def begin(self) -> Iterator[StreamEvent]:
        yield self._at.added(self.item("in_progress", begun=False))
        yield ContentPartAdded(**self._at.next(), part=OutputText(""))

    def delta(self, text: str, logprobs: list[Any]) -> Iterator[StreamEvent]:
        self._pieces.append(text)
        self._logprobs += logprobs
        yield OutputTextDelta(**self._at.next(), delta=text, logprobs=logprobs)

    def end(self, status: ItemStatus) -> Ending:
        item = self.item(status)
        part = item.content[0]
        assert isinstance(part, OutputText)
        yield OutputTextDone(**self._at.next(), text=part.text, logprobs=self._logprobs)
        yield ContentPartDone(**self._at.next(), part=part)
        yield self._at.done(item)
        return item

    def item(self, status: ItemStatus, *, begun: bool = True) -> MessageItem:
        part = OutputText("".join(self._pieces), [], self._logprobs)
        return MessageItem(id=self._at.id, status=status, role="assistant", content=[part] if begun else [])


class _Reasoning:
    """Reasoning that is being written, as the item's content."""

    def __init__(self, at: _Place, *, sealed: bool) -> None:
        self._at, self._sealed, self._pieces = at, sealed, list[str]()

    def begin(self) -> Iterator[StreamEvent]:
        yield self._at.added(ReasoningItem(id=self._at.id, status="in_progress", summary=[], content=[]))
        yield ContentPartAdded(**self._at.next(), part=ReasoningText(""))

    def delta(self, text: str) -> Iterator[StreamEvent]:
        self._pieces.append(text)
        yield ReasoningTextDelta(**self._at.next(), delta=text)

    def end(self, status: ItemStatus) -> Ending:
        item, text = self.item(status), "".join(self._pieces)
        yield ReasoningTextDone(**self._at.next(), text=text)
        yield ContentPartDone(**self._at.next(), part=ReasoningText(text))
        yield self._at.done(item)
        return item

    def item(self, status: ItemStatus) -> ReasoningItem:
        text = "".join(self._pieces)
        item = ReasoningItem(id=self._at.id, status=status, content=[ReasoningText(text)])
        return msgspec.structs.replace(item, encrypted_content=seal(text)) if self._sealed else item


class _Summary(_Reasoning):
    """Reasoning that is being written, as the item's summary."""

    def begin(self) -> Iterator[StreamEvent]:
        yield self._at.added(ReasoningItem(id=self._at.id, status="in_progress", summary=[]))
        yield SummaryPartAdded(**self._at.next(), part=SummaryText(""))

    def delta(self, text: str) -> Iterator[StreamEvent]:
        self._pieces.append(text)
        yield SummaryTextDelta(**self._at.next(), delta=text)

    def end(self, status: ItemStatus) -> Ending:
        item, text = self.item(status), "".join(self._pieces)
        yield SummaryTextDone(**self._at.next(), text=text)
        yield SummaryPartDone(**self._at.next(), part=SummaryText(text))
        yield self._at.done(item)
        return item

    def item(self, status: ItemStatus) -> ReasoningItem:
        text = "".join(self._pieces)
        item = ReasoningItem(id=self._at.id, status=status, summary=[SummaryText(text)])
        return msgspec.structs.replace(item, encrypted_content=seal(text)) if self._sealed else item


class _Call:
    """A call that is being written."""

    def __init__(self, at: _Place, begin: parsers.CallBegin) -> None:
        self._at, self._call_id, self._name, self._pieces = at, begin.id, begin.name, list[str]()

    def begin(self) -> Iterator[StreamEvent]:
        yield self._at.added(self.item("in_progress"))

    def delta(self, text: str) -> Iterator[StreamEvent]:
        self._pieces.append(text)
        yield ArgumentsDelta(**self._at.next(), delta=text)

    def end(self, status: ItemStatus) -> Ending:
        item = self.item(status)
        yield ArgumentsDone(**self._at.next(), name=self._name, arguments=item.arguments)
        yield self._at.done(item)
        return item

    def item(self, status: ItemStatus) -> FunctionCallItem:
        arguments = "".join(self._pieces)
        return FunctionCallItem(
            id=self._at.id, status=status, call_id=self._call_id, name=self._name, arguments=arguments
        )


class _Place:
    """Where in the output an item stands, and the numbers of its events."""

    def __init__(self, writer: ResponseWriter, index: int, kind: type[OutputItem]) -> None:
        self._writer, self.index, self.id = writer, index, new_id(kind)

    def next(self) -> dict[str, Any]:
        return {"sequence_number": self._writer.number(), "output_index": self.index, "item_id": self.id}

    def added(self, item: OutputItem) -> OutputItemAdded:
        return OutputItemAdded(sequence_number=self._writer.number(), output_index=self.index, item=item)

    def done(self, item: OutputItem) -> OutputItemDone:
        return OutputItemDone(sequence_number=self._writer.number(), output_index=self.index, item=item)


class ResponseWriter:
    """Words what a parser tells as the events of a response. Their iterators must be read to their ends.

    The response is the same however the answer was cut into deltas, but for its ids.
    """

    def __init__(self, response: ResponseObject, *, summary: bool = False, sealed: bool = False) -> None:
        """response: without output yet.  summary: reasoning goes into the summary.  sealed: and stands in
        `encrypted_content` as well."""
        self.response = response
        self._summary, self._sealed = summary, sealed
        self._number = -1
        self._output: list[OutputItem] = []
        self._open: _Message | _Reasoning | _Call | None = None
        self._logprobs: list[Any] = []  # of tokens whose text is not known to be content yet

    def number(self) -> int:
        """The next event's sequence number."""
        self._number += 1
        return self._number

    def begin(self, *, queued: bool = False) -> Iterator[StreamEvent]:
        """The first event; of a response that waits, a second."""
        yield ResponseCreated(sequence_number=self.number(), response=self.response)
        if queued:
            yield ResponseQueued(sequence_number=self.number(), response=self.response)

    def start(self) -> Iterator[StreamEvent]:
        """It is being made from now on."""
        self.response = msgspec.structs.replace(self.response, status="in_progress")
        yield ResponseInProgress(sequence_number=self.number(), response=self.response)

    def add(self, events: Sequence[parsers.Event], logprobs: Sequence[Any] = ()) -> Iterator[StreamEvent]:
        """What a delta of the answer says. logprobs: of its tokens. A parser may hold text back, so they go to the
        next content; those of reasoning and calls are dropped, the API has no place for them."""
        self._logprobs += logprobs
        if not any(isinstance(event, parsers.Content) for event in events) and events:
            self._logprobs = []
        for event in events:
            yield from self._add(event)

    def complete(self, usage: ResponseUsage, *, cut: bool) -> Iterator[StreamEvent]:
        """The last events. cut: by max_output_tokens."""
        status: Literal["incomplete", "completed"] = "incomplete" if cut else "completed"
        if not cut and not any(isinstance(item, MessageItem | FunctionCallItem) for item in self._items("completed")):
            yield from self._switch(_Message(self._place(MessageItem)))
        if isinstance(self._open, _Message) and self._logprobs:  # of the end token
            yield from self._open.delta("", self._logprobs)
        yield from self._close(status)
        self._end(status, usage=usage, incomplete_details=IncompleteDetails("max_output_tokens") if cut else None)
        kind = ResponseIncomplete if cut else ResponseCompleted
        yield kind(sequence_number=self.number(), response=self.response)

    def fail(self, error: ResponseError) -> Iterator[StreamEvent]:
        """The last event of a response that breaks."""
        self._end("failed", error=error)
        yield ResponseFailed(sequence_number=self.number(), response=self.response)

    def cancel(self) -> Iterator[StreamEvent]:
        """The last event of a response that is cancelled. The API has none for it: its object says so."""
        self._end("cancelled")
        yield ResponseIncomplete(sequence_number=self.number(), response=self.response)

    def _add(self, event: parsers.Event) -> Iterator[StreamEvent]:
        match event:
            case parsers.Content():
                if not isinstance(self._open, _Message):
                    yield from self._switch(_Message(self._place(MessageItem)))
                assert isinstance(self._open, _Message)
                logprobs, self._logprobs = self._logprobs, []
                yield from self._open.delta(event.text, logprobs)
            case parsers.Reasoning():
                if not isinstance(self._open, _Reasoning):
                    kind = _Summary if self._summary else _Reasoning
                    yield from self._switch(kind(self._place(ReasoningItem), sealed=self._sealed))
                assert isinstance(self._open, _Reasoning)
                yield from self._open.delta(event.text)
            case parsers.CallBegin():
                yield from self._switch(_Call(self._place(FunctionCallItem), event))
            case parsers.CallArguments():
                assert isinstance(self._open, _Call)
                yield from self._open.delta(event.text)
            case parsers.CallEnd():
                yield from self._close("completed" if event.complete else "incomplete")

    def _place(self, kind: type[OutputItem]) -> _Place:
        return _Place(self, len(self._output) + (self._open is not None), kind)

    def _switch(self, following: _Message | _Reasoning | _Call) -> Iterator[StreamEvent]:
        yield from self._close("completed")
        self._open = following
        yield from following.begin()

    def _close(self, status: ItemStatus) -> Iterator[StreamEvent]:
        if self._open is not None:
            item = yield from self._open.end(status)
            self._output.append(item)
            self._open = None

    def _items(self, status: ItemStatus) -> list[OutputItem]:
        return self._output + ([] if self._open is None else [self._open.item(status)])

    def _end(self, status: Literal["completed", "incomplete", "failed", "cancelled"], **changes: Any) -> None:
        output = self._items("incomplete")
        if status == "completed":
            changes["completed_at"] = int(time.time())
        self.response = msgspec.structs.replace(self.response, status=status, output=output, **changes)
