"""A body of the Messages API as the chat request that asks for the same, and errors about that in the words of this
API."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec

from atlas.presets import Presets
from atlas.serve.anthropic.offered_tools import offered_tools
from atlas.serve.anthropic.requests import (
    SAMPLING,
    Conversation,
    MessagesRequest,
    OutputFormat,
    ToolChoice,
    ToolResult,
    Turn,
)
from atlas.serve.anthropic.turns import Turns
from atlas.serve.errors import ApiError, invalid
from atlas.serve.openai.requests import ChatRequest, Effort, ThinkingOptions
from atlas.serve.reference.unknown_fields import NO_SWITCH, Unread
from atlas.text.tools import Function, FunctionName, NamedTool, Tool

_EFFORTS: dict[str, Effort] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""No chat template that has levels has more than three."""


class Translation(msgspec.Struct, frozen=True):
    """chat: what is asked for.  unread: paths of fields that ask for what this model does not have.
    messages, tools: for each one of `chat`, the path of what it was made of.
    """

    chat: ChatRequest
    messages: list[str]
    tools: list[str]
    unread: list[Unread]

    def named(self, path: str) -> str:
        """What a path in `chat` that the template does not read is in the request."""
        if (found := _CALLS.fullmatch(path)) is None:
            return path
        turn = self.messages[int(found[1])].split(".")[1]
        return f"messages[{turn}].content.tool_use"


def translate(request: Conversation, presets: Presets) -> Translation:
    """Raises ApiError 400 for fields that contradict each other.

    presets: what the model can be asked for.
    """
    turns = Turns(late_system=presets.switches.late_system)
    if request.system:
        turns.system(request.system)
    turns.add(request.messages)
    chat = ChatRequest(messages=turns.messages, model=request.model, chat_template_kwargs=request.chat_template_kwargs)
    last = turns.messages[-1] if turns.messages else None
    if last is not None and last.role == "assistant":
        if last.tool_calls:
            raise invalid("messages", "ends with a call", "a turn of the user with its tool_result at the end")
        chat.continue_final_message = True
    tools = _tools(request, chat)
    unread = _thinking(request, chat, presets)
    chat.response_format = _response_format(request)
    if isinstance(request, MessagesRequest):
        for name in SAMPLING:
            setattr(chat, name, getattr(request, name))
        chat.stop = request.stop_sequences
    return Translation(chat, turns.paths, tools, unread)


def _tools(request: Conversation, chat: ChatRequest) -> list[str]:
    """Set the tools, and which of them may be called. Returns their paths."""
    offered = offered_tools(request)
    chat.tools = [
        Tool(Function(entry.tool.name, entry.tool.description, _schema(entry.tool.input_schema), entry.tool.strict))
        for entry in offered
    ]
    if (choice := request.tool_choice) is not None:
        chat.tool_choice = _choice(choice)
        if choice.disable_parallel_tool_use:
            chat.parallel_tool_calls = False
    return [dotted(entry.path) for entry in offered]


def _schema(given: dict[str, Any]) -> dict[str, Any]:
    """Without what the API lets be null, and JSON Schema does not."""
    return {name: value for name, value in given.items() if value is not None or name not in _NULLABLE}


_NULLABLE = ("properties", "required")


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "missing", "the name of a tool", code="missing_required_parameter")
        return NamedTool(FunctionName(choice.name))
    if choice.name is not None:
        raise invalid("tool_choice.name", f"{choice.name[:80]!r} beside the type {choice.type!r}", 'the type "tool"')
    return "required" if choice.type == "any" else choice.type


def _thinking(request: Conversation, chat: ChatRequest, presets: Presets) -> list[Unread]:
    """Set what the model's reasoning is asked for. Returns the paths of what it does not have."""
    unread: list[Unread] = []
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
        chat.thinking = ThinkingOptions("disabled" if disabled else "enabled", budget if reasons else None)
        if budget is not None and not reasons:
            unread.append(Unread("thinking.budget_tokens", "reasoning of this model has no marks by which to end it"))
    elif disabled and has_effort:
        chat.thinking = ThinkingOptions("disabled")
    elif disabled and reasons:
        chat.thinking_budget = 0  # a model that always thinks is stopped where it begins to
    elif reasons:
        chat.thinking_budget = budget
    elif not disabled:
        # Both types allow thinking, at most so long; a model that has none keeps to that.
        unread.append(Unread("thinking", NO_SWITCH))
    effort, effort_path = _effort(request)
    if effort is not None and has_effort and not disabled:
        chat.reasoning_effort = _EFFORTS[effort]
    elif effort is not None:
        unread.append(Unread(effort_path, NO_SWITCH))
    return unread


def _effort(request: Conversation) -> tuple[str | None, str]:
    """What holds for the answer, and its path: turns of the system since the user's last words come first."""
    for position, turn in reversed(list(enumerate(request.messages))):
        if turn.role == "user" and not _only_results(turn):
            break
        if turn.output_config is not None and turn.output_config.effort is not None:
            return turn.output_config.effort, f"messages[{position}].output_config.effort"
    return (request.output_config.effort if request.output_config else None), "output_config.effort"


def _only_results(turn: Turn) -> bool:
    """Whether a turn of the user only goes on with the one before: the model called tools, and they have answered."""
    return all(isinstance(block, ToolResult) for block in turn.content) and bool(turn.content)


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
    (re.compile(r"response_format\.json_schema\.schema\b"), "output_config.format.schema"),
    (re.compile(r"response_format\b"), "output_config.format"),
)

_TOOL = re.compile(r"tools\[(\d+)\](?:\.function(\.parameters\b)?)?")
_CALLS = re.compile(r"messages\[(\d+)\]\.tool_calls")
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content(?:\[\d+\]\.text)?)?")
_TOO_LONG = re.compile(r"messages: (?P<found>(?:at least )?\d+) tokens; accepted: at most (?P<most>\d+) ")


@contextmanager
def callers_words(translation: Translation | None = None) -> Generator[None]:
    """Errors raised inside name fields as Anthropic's API does: `messages.2.content.0.type`.

    translation: errors are about its chat request; without one they are about the body itself.
    """
    try:
        yield
    except ApiError as error:
        path = error.body.param
        message = error.body.message
        if path is not None:
            if translation is None or error.body.code == "unknown_parameter":
                other = dotted(path)
            else:
                other = renamed(path, translation)
            if message.startswith(path):
                message = other + message[len(path) :]
            path = other
        if error.body.code == "context_length_exceeded" and (long := _TOO_LONG.match(message)):
            # Agent tools know by these words that it is time to sum up what was said.
            message = f"prompt is too long: {long['found']} tokens > {long['most']} maximum. {message}"
        raise ApiError(error.status, error.body.code, message, path, error.headers) from None


def renamed(path: str, translation: Translation) -> str:
    """What a path of the translation's chat request was in the request that was made."""
    if (found := _MESSAGE.match(path)) and int(found[1]) < len(translation.messages):
        return dotted(translation.messages[int(found[1])] + path[found.end() :])
    if (found := _TOOL.match(path)) and int(found[1]) < len(translation.tools):
        schema = ".input_schema" if found[2] else ""
        return dotted(translation.tools[int(found[1])] + schema + path[found.end() :])
    for pattern, name in _NAMES:
        if pattern.match(path):
            return dotted(pattern.sub(name, path, count=1))
    return dotted(path)


def dotted(path: str) -> str:
    """`messages[0].content` as Anthropic's API writes it: `messages.0.content`."""
    return re.sub(r"\[(\d+)\]", r".\1", path)
