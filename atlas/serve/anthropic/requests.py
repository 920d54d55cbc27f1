"""Request bodies of the Messages API.

The published shapes are those of the types of the official client. Fields that this server has beyond them are spelt
as OpenAI's endpoints spell them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from atlas.serve.body import convert, decode
from atlas.serve.errors import ApiError, invalid, unsupported
from atlas.serve.openai.requests import MAX_STOP_LENGTH, MAX_STOPS, SamplingFields, Temperature, TopK, TopP, about
from atlas.serve.reference.unknown_fields import unknown_fields
from atlas.text.tools import MAX_TOOLS

CacheControl = Annotated[
    dict[str, Any], about("Accepted wherever Anthropic's API has it; what is cached of prompts does not depend on it.")
]
_SAME = about("As in /v1/chat/completions.")


class Text(msgspec.Struct, tag_field="type", tag="text"):
    """Text, in any turn."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[dict[str, Any]] | None = None


class Thinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought in an earlier turn. A signature is not checked, so that of any server will do."""

    thinking: str
    signature: str = ""
    cache_control: CacheControl | None = None


class RedactedThinking(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Thinking that only Anthropic can read. The model is not shown it."""

    data: str = ""


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the model made in an earlier turn."""

    id: str
    name: str
    input: dict[str, Any] = {}
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class ToolReference(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """In the result of a search for tools: one that was found. From here on it is offered."""

    tool_name: str
    cache_control: CacheControl | None = None


class ToolResult(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What a call gave. `is_error` puts `Error: ` before it."""

    tool_use_id: str
    content: str | list[Text | ToolReference] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class Tool(msgspec.Struct):
    """A function that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Annotated[bool | None, about("Arguments are streamed as they are found, always.")] = None
    defer_loading: Annotated[
        bool | None, about("The tool is offered once a tool_reference or tool_addition has named it.")
    ] = None


class ToolName(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """A tool of `tools`, or one that a turn before defined."""

    name: str


class ToolDefinition(msgspec.Struct, tag_field="type", tag="tool_definition"):
    """A tool that is not among `tools`."""

    definition: Tool


class ToolAddition(msgspec.Struct, tag_field="type", tag="tool_addition"):
    """From here on a tool is offered."""

    tool: ToolName | ToolDefinition
    cache_control: CacheControl | None = None


class ToolRemoval(msgspec.Struct, tag_field="type", tag="tool_removal"):
    """From here on a tool is not offered."""

    tool: ToolName
    cache_control: CacheControl | None = None


Effort = Literal["low", "medium", "high", "xhigh", "max"]


class TurnConfig(msgspec.Struct):
    """What holds for one answer, over what the request says."""

    effort: Effort | None = None


class Turn(msgspec.Struct):
    """One turn of the conversation.

    output_config, clear_at: of a turn of the system. Its text is taken out once a turn of the user stands after it,
    where `clear_at` says so.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[Text | Thinking | RedactedThinking | ToolUse | ToolResult | ToolAddition | ToolRemoval]
    output_config: TurnConfig | None = None
    clear_at: Literal["next_user_message", "never"] | None = None


class ToolChoice(msgspec.Struct):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    """`enabled` and `adaptive` let the model think, for `budget_tokens` at most. Without any of them the model's own
    default holds."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, about("Tokens after which thinking is ended.", minimum=1)] = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    """A JSON schema that the answer's text must follow."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """How much effort, and which format."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct):
    """Who asked. It changes nothing."""

    user_id: str | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens: all that makes the prompt. `null` is the same as leaving a field out."""

    messages: Annotated[list[Turn], about("The conversation.", minItems=1)]
    model: Annotated[str | None, about("One of the served model's names.")] = None
    system: Annotated[str | list[Text] | None, about("What stands before the conversation.")] = None
    tools: Annotated[list[Tool] | None, about("Functions that the model may call.", maxItems=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, about("The older name of output_config.format.")] = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("More variables for the chat template.")] = None


class MessagesRequest(Conversation, kw_only=True):
    """Body of POST /v1/messages. The fields after `metadata` are this server's own."""

    max_tokens: Annotated[
        int, about("Most tokens of the answer; more than the context has room for is cut to that.", minimum=1)
    ]
    stop_sequences: Annotated[
        list[Annotated[str, about("Text.", minLength=1, maxLength=MAX_STOP_LENGTH)]] | None,
        about("The answer ends before any of these.", maxItems=MAX_STOPS),
    ] = None
    stream: Annotated[bool | None, about("Answer with server-sent events, as the text comes.")] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    metadata: Metadata | None = None
    min_tokens: Annotated[int | None, _SAME] = None
    min_p: Annotated[float | None, _SAME] = None
    repetition_penalty: Annotated[float | None, _SAME] = None
    presence_penalty: Annotated[float | None, _SAME] = None
    frequency_penalty: Annotated[float | None, _SAME] = None
    logit_bias: Annotated[dict[str, float] | None, _SAME] = None
    seed: Annotated[int | None, _SAME] = None
    stop_token_ids: Annotated[list[int] | None, _SAME] = None
    include_stop_str_in_output: Annotated[bool | None, _SAME] = None
    ignore_eos: Annotated[bool | None, _SAME] = None
    priority: Annotated[int | None, _SAME] = None


SAMPLING = (
    "max_tokens",
    *(name for name in MessagesRequest.__struct_fields__ if name in SamplingFields.__struct_fields__),
)
"""Fields that mean what they mean in /v1/chat/completions."""

MESSAGES_REFUSED: Mapping[str, tuple[Any, ...]] = {
    # Fields that other servers have, with the values, besides null, that ask for nothing.
    "compaction": (),
    "container": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
}

Body = TypeVar("Body", MessagesRequest, Conversation)


def read(body: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """A request body and the paths of the fields in it that nothing reads. Raises ApiError 400."""
    value = decode(body)
    if value.get("thread") is not None:
        # Turns before it would be lost without a word. By this code clients know to send all of them.
        message = "thread: conversations are not kept here; leave it out, and send the whole conversation"
        raise ApiError(400, "thread_unsupported_request", message, "thread")
    _check_types(value)
    request = convert(value, kind, MESSAGES_REFUSED, ("max_tokens",))
    ignored = unknown_fields(value, kind)
    return request, ignored + _first_redacted(request.messages)


def _first_redacted(turns: list[Turn]) -> list[str]:
    """The path of the first block whose text only Anthropic has."""
    for n_turn, turn in enumerate(turns):
        for n_block, block in enumerate(turn.content):
            if isinstance(block, RedactedThinking):
                return [f"messages[{n_turn}].content[{n_block}].data"]
    return []


_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text", "tool_addition", "tool_removal"),
}


def _check_types(value: dict[str, Any]) -> None:
    """Refuse by name what a text model has no use for, before the shapes are checked: of a picture or a tool that
    runs on Anthropic's servers the reader wants to hear that, and not which of its fields is unknown."""
    for n_turn, turn in enumerate(_objects(value.get("messages"))):
        role = turn.get("role")
        accepted = _OF_ROLE.get(role) if isinstance(role, str) else None
        if accepted is None:
            continue  # the conversion says it
        for n_block, block in enumerate(_objects(turn.get("content"))):
            path = f"messages[{n_turn}].content[{n_block}]"
            _check_block(block, path, accepted, f"a turn of the role {role}")
            if block.get("type") == "tool_result":
                for n_part, part in enumerate(_objects(block.get("content"))):
                    _check_block(part, f"{path}.content[{n_part}]", ("text", "tool_reference"), "a tool_result")
            if block.get("type") == "tool_addition" and isinstance(tool := block.get("tool"), dict):
                _check_tool(tool.get("definition"), f"{path}.tool.definition")
    for n_block, block in enumerate(_objects(value.get("system"))):
        _check_block(block, f"system[{n_block}]", ("text",), "the system prompt")
    for n_tool, tool in enumerate(_objects(value.get("tools"))):
        _check_tool(tool, f"tools[{n_tool}]")


def _check_tool(tool: Any, path: str) -> None:
    if isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "custom":
        raise unsupported(f"{path}.type", repr(kind[:80]), "give tools of your own, with an input_schema")


def _check_block(block: dict[str, Any], path: str, accepted: tuple[str, ...], where: str) -> None:
    if isinstance(kind := block.get("type"), str) and kind not in accepted:
        found = f"{kind[:80]!r} in {where}"
        raise invalid(
            f"{path}.type", found, f"{', '.join(accepted)} (this model reads text)", code="unsupported_content"
        )


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; in the place of what is none an empty one, so that places stay what they are."""
    return [item if isinstance(item, dict) else {} for item in value] if isinstance(value, list) else []
