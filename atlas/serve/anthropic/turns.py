"""Turns of the Messages API as the messages that chat templates are given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atlas.serve.anthropic.events import hidden_thinking
from atlas.serve.anthropic.requests import (
    RedactedThinking,
    Text,
    Thinking,
    ToolReference,
    ToolResult,
    ToolUse,
    Turn,
)
from atlas.text.messages import ChatMessage, FunctionCall, TextPart, ToolCall

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""A line at the head of the system prompt in which Claude Code tells Anthropic who pays. It is different in each
request, so that no prefix of a prompt would ever be found again, and means nothing to a model."""


class Turns:
    """The messages of a conversation: a result of a tool is one of its own, and neighbours of one role are one.

    paths: for each message, the path of what it was made of.
    """

    def __init__(self, *, late_system: bool) -> None:
        """late_system: the template takes system messages anywhere. Otherwise those that come late stand in turns of
        the user, in the tags in which agent tools put what is not the user's."""
        self.messages: list[ChatMessage] = []
        self.paths: list[str] = []
        self._late_system = late_system
        self._names: dict[str, str] = {}  # of the tools that were called, by the call's id

    def system(self, prompt: str | list[Text]) -> None:
        """What stands before the conversation."""
        texts = [prompt] if isinstance(prompt, str) else [block.text for block in prompt]
        if texts and (billing := _BILLING.match(texts[0])):
            texts[0] = texts[0][billing.end() :]
            texts = texts if texts[0] else texts[1:]
        for text in texts:
            self._text("system", text, "system")

    def add(self, turns: Sequence[Turn]) -> None:
        """The conversation."""
        last_of_user = max((n for n, turn in enumerate(turns) if turn.role == "user"), default=-1)
        for position, turn in enumerate(turns):
            path = f"messages.{position}"
            if turn.role == "system":
                if turn.clear_at != "next_user_message" or position > last_of_user:
                    self._system_turn(turn, path)
            elif isinstance(turn.content, str):
                self._text(turn.role, turn.content, path)
            elif not turn.content:
                self._message(turn.role, path)
            else:
                for n_block, block in enumerate(turn.content):
                    self._block(turn.role, block, f"{path}.content.{n_block}")

    def _system_turn(self, turn: Turn, path: str) -> None:
        blocks = [turn.content] if isinstance(turn.content, str) else turn.content
        texts = [block if isinstance(block, str) else block.text for block in blocks if isinstance(block, str | Text)]
        if self._late_system or all(message.role == "system" for message in self.messages):
            for text in texts:
                self._text("system", text, path)
        elif any(texts):
            self._text("user", "<system-reminder>\n" + "\n".join(texts) + "\n</system-reminder>", path)

    def _block(self, role: str, block: Any, path: str) -> None:
        match block:
            case Text():
                self._text(role, block.text, path)
            case ToolResult():
                name = self._names.get(block.tool_use_id)
                parts = [TextPart(text) for text in _result(block)]
                self._append(ChatMessage("tool", parts, name=name, tool_call_id=block.tool_use_id), path)
            case ToolUse():
                self._names[block.id] = block.name
                message = self._message(role, path)
                call = ToolCall(FunctionCall(block.name, block.input), block.id)
                if message.tool_calls is None:
                    message.tool_calls = []
                message.tool_calls.append(call)
            case Thinking():
                message = self._message(role, path)
                thinking = block.thinking or hidden_thinking(block.signature)
                message.reasoning_content = (message.reasoning_content or "") + thinking
            case RedactedThinking():
                self._message(role, path)

    def _text(self, role: str, text: str, path: str) -> None:
        content = self._message(role, path).content
        assert isinstance(content, list)
        content.append(TextPart(text))

    def _message(self, role: str, path: str) -> ChatMessage:
        """The last message if it is of this role, else a new one."""
        if not self.messages or self.messages[-1].role != role:
            self._append(ChatMessage(role, []), path)  # type: ignore[arg-type]  # the role was checked
        return self.messages[-1]

    def _append(self, message: ChatMessage, path: str) -> None:
        self.messages.append(message)
        self.paths.append(path)


def _result(block: ToolResult) -> list[str]:
    content: str | list[Text | ToolReference] = block.content or ""
    parts = [content] if isinstance(content, str) else content
    texts = [_text_of(part) for part in parts]
    if block.is_error:
        # Chat templates have no place for it, and the model should know.
        texts[0] = f"Error: {texts[0]}" if texts[0] else "Error"
    return texts


def _text_of(part: str | Text | ToolReference) -> str:
    if isinstance(part, ToolReference):
        return f"The tool {part.tool_name} can be called now."
    return part if isinstance(part, str) else part.text
