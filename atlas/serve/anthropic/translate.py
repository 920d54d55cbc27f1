"""A body of the Messages API as the chat request that asks for the same, and errors about that in the words of this
API."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from atlas.serve.anthropic.events import hidden_thinking
from atlas.serve.anthropic.requests import (
    SAMPLING,
    Conversation,
    MessagesRequest,
    OutputFormat,
    RedactedThinking,
    Text,
    Thinking,
    ToolChoice,
    ToolResult,
    ToolUse,
)
from atlas.serve.errors import ApiError, invalid
from atlas.serve.openai.requests import ChatRequest, Effort, ThinkingOptions
from atlas.serve.presets import Presets
from atlas.text.messages import ChatMessage, FunctionCall, TextPart, ToolCall
from atlas.text.tools import Function, FunctionName, NamedTool
from atlas.text.tools import Tool as ChatTool

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""A line at the head of the system prompt in which Claude Code tells Anthropic who pays. It is different in each
request, so that no prefix of a prompt would ever be found again, and means nothing to a model."""

_EFFORTS: dict[str, Effort] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""No chat template that has levels has more than three."""


class Translation(msgspec.Struct, frozen=True):
    """chat: what is asked for.  paths: for each message of it, the path of what it was made of.
    unread: paths of fields that ask for what this model does not have.
    """

    chat: ChatRequest
    paths: list[str]
    unread: list[str]


def translate(request: Conversation, presets: Presets) -> Translation:
    """Raises ApiError 400 for fields that contradict each other.

    presets: what the model's reasoning can be asked for.
    """
    turns = _Turns()
    if request.system:
        turns.system(request.system)
    for position, turn in enumerate(request.messages):
        turns.add(turn.role, turn.content, f"messages.{position}")
    chat = ChatRequest(messages=turns.messages, model=request.model, chat_template_kwargs=request.chat_template_kwargs)
    last = turns.messages[-1] if turns.messages else None
    if last is not None and last.role == "assistant":
        if last.tool_calls:
            raise invalid("messages", "ends with a call", "a turn of the user with its tool_result at the end")
        chat.continue_final_message = True
    _tools(request, chat)
    unread = _thinking(request, chat, presets)
    chat.response_format = _response_format(request)
    if isinstance(request, MessagesRequest):
        for name in SAMPLING:
            setattr(chat, name, getattr(request, name))
        chat.stop = request.stop_sequences
    return Translation(chat, turns.paths, unread)


class _Turns:
    """Turns of this API as messages: a result of a tool is one of its own, and neighbours of one role are one."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.paths: list[str] = []
        self._names: dict[str, str] = {}  # of the tools that were called, by the call's id

    def system(self, prompt: str | list[Text]) -> None:
        texts = [prompt] if isinstance(prompt, str) else [block.text for block in prompt]
        if texts and (billing := _BILLING.match(texts[0])):
            texts[0] = texts[0][billing.end() :]
            texts = texts if texts[0] else texts[1:]
        if texts:
            self._append(ChatMessage("system", [TextPart(text) for text in texts]), "system")

    def add(self, role: str, content: str | list[Any], path: str) -> None:
        if isinstance(content, str):
            self._text(role, content, path)
            return
        if not content:
            self._message(role, path)
        for position, block in enumerate(content):
            where = f"{path}.content.{position}"
            match block:
                case Text():
                    self._text(role, block.text, where)
                case ToolResult():
                    name = self._names.get(block.tool_use_id)
                    parts = _result(block)
                    self._append(ChatMessage("tool", parts, name=name, tool_call_id=block.tool_use_id), where)
                case ToolUse():
                    self._names[block.id] = block.name
                    message = self._message(role, where)
                    call = ToolCall(FunctionCall(block.name, block.input), block.id)
                    message.tool_calls = [*(message.tool_calls or ()), call]
                case Thinking():
                    message = self._message(role, where)
                    thinking = block.thinking or hidden_thinking(block.signature)
                    message.reasoning_content = (message.reasoning_content or "") + thinking
                case RedactedThinking():
                    self._message(role, where)

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


def _result(block: ToolResult) -> list[TextPart]:
    content: str | list[Text] = block.content or ""
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    if block.is_error and texts:
        # Chat templates have no place for it, and the model should know.
        texts[0] = f"Error: {texts[0]}" if texts[0] else "Error"
    return [TextPart(text) for text in texts]


def _tools(request: Conversation, chat: ChatRequest) -> None:
    if request.tools:
        chat.tools = [
            ChatTool(Function(tool.name, tool.description, tool.input_schema, tool.strict)) for tool in request.tools
        ]
    choice = request.tool_choice
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    chat.tool_choice = _choice(choice)


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "missing", "the name of a tool", code="missing_required_parameter")
        return NamedTool(FunctionName(choice.name))
    if choice.name is not None:
        raise invalid("tool_choice.name", f"{choice.name[:80]!r} beside the type {choice.type!r}", 'the type "tool"')
    return "required" if choice.type == "any" else choice.type


def _thinking(request: Conversation, chat: ChatRequest, presets: Presets) -> list[str]:
    """Set what the model's reasoning is asked for. Returns the paths of what it does not have."""
    unread = []
    asked, switches, reasons = request.thinking, presets.switches, presets.markers is not None
    has_effort = "reasoning_effort" in switches.names
    disabled = asked is not None and asked.type == "disabled"
    budget = None if asked is None else asked.budget_tokens
    if budget is not None and disabled:
        raise invalid("thinking.budget_tokens", f"{str(budget)[:40]}, but thinking is disabled", "one of the two")
    if budget is not None and budget < 1:
        raise invalid("thinking.budget_tokens", str(budget)[:40], "an integer of at least 1")
    if asked is None:
        pass
    elif switches.thinking is not None:
        chat.thinking = ThinkingOptions("disabled" if disabled else "enabled", budget)
    elif disabled and has_effort:
        chat.thinking = ThinkingOptions("disabled")
    elif disabled and reasons:
        chat.thinking_budget = 0  # a model that always thinks is stopped where it begins to
    elif reasons:
        chat.thinking_budget = budget
    elif not disabled:
        # Both types allow thinking, at most so long; a model that has none keeps to that.
        unread.append("thinking")
    effort = request.output_config.effort if request.output_config else None
    if effort is not None and has_effort and not disabled:
        chat.reasoning_effort = _EFFORTS[effort]
    elif effort is not None:
        unread.append("output_config.effort")
    return unread


def _response_format(request: Conversation) -> dict[str, Any] | None:
    wanted: OutputFormat | None = request.output_config.format if request.output_config else None
    if wanted is not None and request.output_format is not None and wanted != request.output_format:
        raise invalid("output_format", "another format than output_config.format", "one of the two")
    wanted = wanted or request.output_format
    if wanted is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema, "strict": True}}


_NAMES = (
    # Fields of the chat request, and what they were in the request that was made.
    (re.compile(r"stop(?=\[|$)"), "stop_sequences"),
    (re.compile(r"thinking_budget$"), "thinking.budget_tokens"),
    (re.compile(r"continue_final_message$"), "messages"),
    (re.compile(r"reasoning_effort$"), "output_config.effort"),
    (re.compile(r"tool_choice\.function\.name$"), "tool_choice.name"),
    (re.compile(r"parallel_tool_calls$"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"response_format\.json_schema\.schema\b"), "output_config.format.schema"),
    (re.compile(r"response_format\b"), "output_config.format"),
)

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content(?:\[\d+\]\.text)?)?")
_TOO_LONG = re.compile(r"messages: (?P<found>(?:at least )?\d+) tokens; accepted: at most (?P<most>\d+) ")


@contextmanager
def callers_words(paths: Sequence[str] | None = None) -> Generator[None]:
    """Errors raised inside name fields as Anthropic's API does: `messages.2.content.0.type`.

    paths: those of a `Translation`, for errors about the chat request; without them errors are about the body itself.
    """
    try:
        yield
    except ApiError as error:
        path = error.body.param
        message = error.body.message
        if path is not None:
            other = _renamed(path, paths)
            if message.startswith(path):
                message = other + message[len(path) :]
            path = other
        if error.body.code == "context_length_exceeded" and (long := _TOO_LONG.match(message)):
            # Agent tools know by these words that it is time to sum up what was said.
            message = f"prompt is too long: {long['found']} tokens > {long['most']} maximum. {message}"
        raise ApiError(error.status, error.body.code, message, path, error.headers) from None


def _renamed(path: str, paths: Sequence[str] | None) -> str:
    if paths is not None:
        if (found := _MESSAGE.match(path)) and int(found[1]) < len(paths):
            path = paths[int(found[1])] + path[found.end() :]
        for pattern, name in _NAMES:
            if pattern.match(path):
                path = pattern.sub(name, path, count=1)
                break
    return dotted(path)


def dotted(path: str) -> str:
    """`messages[0].content` as Anthropic's API writes it: `messages.0.content`."""
    return re.sub(r"\[(\d+)\]", r".\1", path)
