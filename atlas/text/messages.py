"""Conversations: the messages that the OpenAI API defines, and the turns that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from atlas.errors import RequestError
from atlas.text.chat_template import CallStyle, ChatTemplate


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """One text part of a message's content."""

    text: str


class FunctionCall(msgspec.Struct):
    """The call inside a tool call; `arguments` is a JSON string in the API, an object is taken too."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct):
    """A tool call that an assistant turn of the history made."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same under another name that servers and clients use."""

    @property
    def text(self) -> str:
        """The content; parts are lines of it."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


def turns(messages: Sequence[ChatMessage], guard: Callable[[str], str], template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages as this template expects them, the client's own words guarded.

    Guarding (Tokenizer.guard) is what keeps a special token typed by a user from becoming a control token.
    Roles and the API's own names are not the client's words, and templates compare them, so they stay as they are.

    Raises:
        RequestError: a message without content whose role needs one.
    """
    result = []
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if message.content is None and message.role not in ("assistant", "tool", "function"):
            raise RequestError(f"{where}.content", "null or absent", "a string or a list of text parts")
        role = message.role
        if role == "developer" and not template.knows_developer:
            role = "system"  # the same thing under its older name
        # Not None: a template that prints the content would print the word "None".
        turn: dict[str, Any] = {"role": role, "content": guard(message.text)}
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        others = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
        turn |= {name: guard(value) for name, value in others.items() if value is not None}
        if message.tool_calls:
            style = template.call_style
            turn["tool_calls"] = [_tool_call(call, guard, style) for call in message.tool_calls]
            if style.null_content and not message.text:
                turn["content"] = None
        result.append(turn)
    return result


def _tool_call(call: ToolCall, guard: Callable[[str], str], style: CallStyle) -> dict[str, Any]:
    arguments = _arguments(call.function.arguments, guard)
    if style.text_arguments and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": guard(call.function.name), "arguments": arguments}
    result: dict[str, Any] = {"type": call.type, "function": function}
    if call.id is not None:
        result["id"] = guard(call.id)
    return result


def _arguments(arguments: str | dict[str, Any], guard: Callable[[str], str]) -> Any:
    """Most templates index and print arguments as an object; the API carries them as a JSON string.

    What is no JSON object stays the text that it is: it was written by a model, and nothing better is known.
    """
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.MsgspecError, RecursionError, ValueError):
            value = None
    return guard_all(value if isinstance(value, dict) else arguments, guard)


def guard_all(value: Any, guard: Callable[[str], str]) -> Any:
    """JSON data with all its strings guarded."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, dict):
        return {guard(key): guard_all(item, guard) for key, item in value.items()}
    if isinstance(value, list):
        return [guard_all(item, guard) for item in value]
    return value
