"""From the items of the Responses API to the messages that chat templates know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from atlas.serve.errors import ApiError, invalid
from atlas.serve.openai.responses_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
    Refusal,
    unseal,
)
from atlas.serve.openai.responses_tools import full_name
from atlas.text.messages import ChatMessage, FunctionCall, ToolCall

PREVIOUS = "previous_response_id"
"""What errors call an item that comes from there."""


class Conversation:
    """Items, taken one after another, as messages. An assistant's message, calls and reasoning are one turn as long as
    nobody else has the word: what one answer gave back as several items is put together again.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.where: list[str] = []  # for each message the field that it comes from
        self._turn: ChatMessage | None = None  # the assistant's, which may go on
        # Its texts, which are joined when there are no more: each time would take hours for 100,000 items.
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: set[str] = set()

    def extend(self, items: Iterable[Item], where: Sequence[str] | str) -> None:
        """where: what errors call the items; one name for all, or one for each. Raises ApiError 400."""
        for position, item in enumerate(items):
            self._add(item, where if isinstance(where, str) else where[position])
        self._join()

    def instruct(self, instructions: str, *, knows_developer: bool) -> None:
        """Put `instructions` before all. Templates take one system message at the beginning, so those that begin the
        input become part of it."""
        alike = {"system"} if knows_developer else {"system", "developer"}
        first = list(takewhile(lambda message: message.role in alike, self.messages))
        texts = [instructions, *(message.text for message in first)]
        self.messages[: len(first)] = [ChatMessage("system", "\n\n".join(texts))]
        self.where[: len(first)] = ["instructions"]

    def cuts(self) -> list[int]:
        """How many messages may go from the beginning, the system's not counted: up to each one of the user's, but for
        the first."""
        start = self._start()
        users = [place for place, message in enumerate(self.messages) if message.role == "user"]
        return [place - start for place in users if place > start]

    def without(self, cut: int) -> Conversation:
        """The same with `cut` messages less at the beginning, behind the system's."""
        other, start = Conversation(), self._start()
        other.messages = self.messages[:start] + self.messages[start + cut :]
        other.where = self.where[:start] + self.where[start + cut :]
        return other

    def _start(self) -> int:
        """How many system messages there are at the beginning."""
        others = (n for n, message in enumerate(self.messages) if message.role not in ("system", "developer"))
        return next(others, len(self.messages))

    def _add(self, item: Item, where: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                text = _text_of(item)
                turn = self._turn
                if turn is None or (self._content and not turn.tool_calls):
                    self._begin(where)
                self._content.append(text)
            case MessageItem():
                self._append(ChatMessage(item.role, _text_of(item)), where)
            case ReasoningItem():
                if not (text := _reasoning_of(item, where)):
                    return
                turn = self._turn
                if turn is None or not (turn.tool_calls or not (self._content or self._reasoning)):
                    self._begin(where)
                self._reasoning.append(text)
            case FunctionCallItem():
                turn = self._turn or self._begin(where)
                call = ToolCall(
                    FunctionCall(full_name(item.namespace or None, item.name), item.arguments), item.call_id
                )
                if turn.tool_calls is None:
                    turn.tool_calls = []
                turn.tool_calls.append(call)
                self._calls.add(item.call_id)
            case FunctionCallOutputItem():
                if item.call_id not in self._calls:
                    found = f"{item.call_id[:80]!r}, which no function_call before it has"
                    raise invalid(f"{where}.call_id", found, "the call_id of a call", code="unknown_call_id")
                output = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
                self._append(ChatMessage("tool", output, tool_call_id=item.call_id), where)

    def _begin(self, where: str) -> ChatMessage:
        turn = ChatMessage("assistant")
        self._append(turn, where)
        self._turn = turn
        return turn

    def _join(self) -> None:
        """Make the open turn's texts one each."""
        if self._turn is not None and self._content:
            self._turn.content = "".join(self._content)
            self._content = [self._turn.content]
        if self._turn is not None and self._reasoning:
            self._turn.reasoning_content = "".join(self._reasoning)
            self._reasoning = [self._turn.reasoning_content]

    def _append(self, message: ChatMessage, where: str) -> None:
        self._join()
        self._turn, self._content, self._reasoning = None, [], []
        self.messages.append(message)
        self.where.append(where)


def _text_of(item: MessageItem) -> str:
    if isinstance(item.content, str):
        return item.content
    texts = [part.refusal if isinstance(part, Refusal) else part.text for part in item.content]
    # Parts that a client wrote are paragraphs, as in a chat message; those of an answer are one text.
    return ("" if item.role == "assistant" else "\n").join(texts)


def _reasoning_of(item: ReasoningItem, where: str) -> str:
    """Its text; from the summary where that is all there is, for there Atlas writes all of it."""
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content:
        text = unseal(item.encrypted_content)
        if text is None:
            message = f"{where}.encrypted_content: not made by this server; leave the item out"
            raise ApiError(400, "invalid_encrypted_content", message, f"{where}.encrypted_content")
        return text
    return "\n\n".join(part.text for part in item.summary)


def normalise(value: dict[str, Any]) -> None:
    """Give the raw items of a body the type that the API lets a client leave out, and refuse by name what is no item of
    Atlas's, before the body is converted. Raises ApiError 400."""
    items = value.get("input")
    if not isinstance(items, list):
        return
    for position, item in enumerate(items):
        if not isinstance(item, dict):
            continue
        if item.get("type") is None:
            item["type"] = "message" if "role" in item else "item_reference" if "id" in item else None
        kind = item["type"]
        if kind not in _TYPES:
            where, accepted = f"input[{position}].type", ", ".join(_TYPES)
            if kind is None:
                raise invalid(where, "missing", accepted, code="missing_required_parameter")
            shown = kind[:80] if isinstance(kind, str) else type(kind).__name__
            raise invalid(where, repr(shown), accepted, code="unsupported_item")


_TYPES = tuple(
    str(kind.__struct_config__.tag)
    for kind in (MessageItem, ReasoningItem, FunctionCallItem, FunctionCallOutputItem, ItemReference)
)
