"""Response bodies and events of the Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

JsonObject = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
"""A JSON object in the model's own spelling: no number is rounded, no key lost, on its way through."""


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text for the user."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Text the model wrote for itself."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call for the client to make."""

    id: str
    name: str
    input: JsonObject


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Of the answer's tokens, those of thinking and its markers."""

    thinking_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. The prompt's are `input_tokens`, which were computed, and `cache_read_input_tokens`, which were not."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails | msgspec.UnsetType = msgspec.UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The assistant's turn."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    usage: Usage


class TokenCount(msgspec.Struct, frozen=True):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More thinking."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The last of a thinking block."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of a call's arguments, as JSON text."""

    partial_json: str


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """The first event: a message without content."""

    message: Message


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Block


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """More of the block that is open."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """The block that is open ends."""

    index: int


class Stop(msgspec.Struct, frozen=True):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """Why the message ends, and what it took: sums, which replace those of `message_start`."""

    delta: Stop
    usage: Usage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """Nothing has happened."""


MessageEvent = (
    MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping
)

_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """A stream event, named as its type is."""
    name: str = type(value).__struct_config__.tag
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"
