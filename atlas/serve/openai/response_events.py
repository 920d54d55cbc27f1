"""The events of a response's stream."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from atlas.serve.errors import ResponsesErrorEvent
from atlas.serve.openai.responses_items import OutputItem, OutputText, ReasoningText, SummaryText
from atlas.serve.openai.responses_objects import ResponseObject


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class _Lifecycle(_Event, frozen=True, kw_only=True):
    response: ResponseObject


class ResponseCreated(_Lifecycle, frozen=True, tag="response.created"):
    """The first event."""


class ResponseQueued(_Lifecycle, frozen=True, tag="response.queued"):
    """Of a response in the background: it waits."""


class ResponseInProgress(_Lifecycle, frozen=True, tag="response.in_progress"):
    """It is being made."""


class ResponseCompleted(_Lifecycle, frozen=True, tag="response.completed"):
    """The last event: the model came to an end."""


class ResponseIncomplete(_Lifecycle, frozen=True, tag="response.incomplete"):
    """The last event: it was cut by max_output_tokens, or cancelled."""


class ResponseFailed(_Lifecycle, frozen=True, tag="response.failed"):
    """The last event: it broke."""


class _ItemEvent(_Event, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_ItemEvent, frozen=True, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_ItemEvent, frozen=True, tag="response.output_item.done"):
    """An item is as it stands in the response."""


class _InItem(_Event, frozen=True, kw_only=True):
    output_index: int
    item_id: str


class _InContent(_InItem, frozen=True, kw_only=True):
    content_index: int = 0


class _PartEvent(_InContent, frozen=True, kw_only=True):
    part: OutputText | ReasoningText


class ContentPartAdded(_PartEvent, frozen=True, tag="response.content_part.added"):
    """A part of an item's content begins."""


class ContentPartDone(_PartEvent, frozen=True, tag="response.content_part.done"):
    """A part of an item's content, whole."""


class OutputTextDelta(_InContent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    obfuscation: str | UnsetType = UNSET
    logprobs: list[Any] = []


class OutputTextDone(_InContent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The text, whole."""

    text: str
    logprobs: list[Any] = []


class ReasoningTextDelta(_InContent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More of what the model writes for itself."""

    delta: str
    obfuscation: str | UnsetType = UNSET


class ReasoningTextDone(_InContent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """What the model wrote for itself, whole."""

    text: str


class _InSummary(_InItem, frozen=True, kw_only=True):
    summary_index: int = 0


class _SummaryPartEvent(_InSummary, frozen=True, kw_only=True):
    part: SummaryText


class SummaryPartAdded(_SummaryPartEvent, frozen=True, tag="response.reasoning_summary_part.added"):
    """A part of a summary begins."""


class SummaryPartDone(_SummaryPartEvent, frozen=True, tag="response.reasoning_summary_part.done"):
    """A part of a summary, whole."""


class SummaryTextDelta(_InSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_text.delta"):
    """More of a summary."""

    delta: str
    obfuscation: str | UnsetType = UNSET


class SummaryTextDone(_InSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_text.done"):
    """A summary's text, whole."""

    text: str


class ArgumentsDelta(_InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str
    obfuscation: str | UnsetType = UNSET


class ArgumentsDone(_InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """A call's arguments, whole."""

    name: str
    arguments: str


StreamEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ResponsesErrorEvent
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryTextDelta
    | SummaryTextDone
    | ArgumentsDelta
    | ArgumentsDone
)

_OBFUSCATED_SIZE = 32

_encoder = msgspec.json.Encoder()


def obfuscated(event: StreamEvent) -> StreamEvent:
    """A delta with as many random characters beside it as make its size a multiple of 32: whoever only sees how long
    the packets are learns less of the text."""
    if not isinstance(event, OutputTextDelta | ReasoningTextDelta | SummaryTextDelta | ArgumentsDelta):
        return event
    missing = -len(event.delta.encode()) % _OBFUSCATED_SIZE
    return msgspec.structs.replace(event, obfuscation=secrets.token_urlsafe(_OBFUSCATED_SIZE)[:missing])


def encode(event: StreamEvent) -> bytes:
    """An event as it goes over the wire."""
    name = str(event.__struct_config__.tag)
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"
