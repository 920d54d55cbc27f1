"""The items of OpenAI's Responses API: what a conversation is made of, in a request, in an answer and in the store."""

from __future__ import annotations

import base64
import secrets
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_SEALED = "atlas-reasoning-1:"


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text that the client wrote."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text that a model wrote. logprobs: an entry for each of its tokens, where they were asked for."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = []


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    """A model's refusal, in a history that comes from elsewhere: Atlas's models write theirs as text."""

    refusal: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A part of a reasoning item's summary."""

    text: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A part of what a model wrote for itself."""

    text: str


ContentPart = InputText | OutputText | Refusal


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """One message. In the store and in answers it has all fields, and its content is a list."""

    id: str | None = None
    status: ItemStatus | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What the model wrote for itself: in `content`, or in `summary` where the request asked for one."""

    id: str | None = None
    status: ItemStatus | None = None
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType | None = UNSET
    encrypted_content: str | UnsetType | None = UNSET

    @property
    def is_bare(self) -> bool:
        """Whether it has no text at all."""
        return not (self.content or self.encrypted_content or self.summary)


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call of one of the request's tools. arguments: JSON; not whole where the status is incomplete.  namespace: what
    the function stands in, where it does."""

    id: str | None = None
    status: ItemStatus | None = None
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType | None = UNSET


class FunctionCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True):
    """What a call gave back."""

    id: str | None = None
    status: ItemStatus | None = None
    call_id: str
    output: str | list[InputText]


class ItemReference(msgspec.Struct, tag_field="type", tag="item_reference"):
    """An item that the server has stored."""

    id: str


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem
InputItem = Item | ItemReference
OutputItem = MessageItem | ReasoningItem | FunctionCallItem

_PREFIXES: dict[type[Item], str] = {
    MessageItem: "msg",
    ReasoningItem: "rs",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
}


def new_id(kind: type[Item]) -> str:
    """An id for an item of this kind."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"


def complete(item: Item) -> Item:
    """The item as the store keeps it: with an id, a status, and its content as a list of parts."""
    changes: dict[str, Any] = {"id": item.id or new_id(type(item)), "status": item.status or "completed"}
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part = OutputText(item.content) if item.role == "assistant" else InputText(item.content)
        changes["content"] = [part]
    return msgspec.structs.replace(item, **changes)


def items_of(data: bytes) -> list[Item]:
    """The items of a stored list."""
    return _decoder.decode(data)


_decoder: msgspec.json.Decoder[list[Item]] = msgspec.json.Decoder(list[Item])


def seal(text: str) -> str:
    """`encrypted_content`: reasoning as a token that a client without the text can send back.

    It hides nothing: who may have it may have the text.
    """
    return base64.b64encode((_SEALED + text).encode()).decode()


def unseal(token: str) -> str | None:
    """The inverse of `seal`; None for what another server made."""
    try:
        text = base64.b64decode(token, validate=True).decode()
    except ValueError:
        return None
    return text.removeprefix(_SEALED) if text.startswith(_SEALED) else None
