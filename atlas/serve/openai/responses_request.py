"""The body of POST /v1/responses, and the chat request that asks for the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from atlas.engine.sampling import MAX_LOGPROBS
from atlas.serve.body import convert, decode
from atlas.serve.errors import invalid, unsupported
from atlas.serve.openai.requests import ChatRequest, Effort, SamplingFields, about
from atlas.serve.openai.responses_conversation import Conversation, normalise
from atlas.serve.openai.responses_items import InputItem
from atlas.serve.openai.responses_tools import (
    AllowedFunctions,
    ResponseTool,
    ResponseToolChoice,
    choice_of,
    functions_of,
    normalise_tools,
)
from atlas.serve.reference.unknown_fields import unknown_fields

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of tools that Atlas does not have: there is never anything of the kind to include.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
INCLUDABLE: tuple[str, ...] = get_args(Includable)

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """A JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """What the answer's text must be."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(msgspec.Struct):
    """Whether the model reasons, and where the answer has it."""

    effort: Annotated[Effort | None, about("As reasoning_effort of a chat request.")] = None
    summary: Annotated[
        Literal["auto", "detailed"] | None,
        about("The reasoning, all of it, comes as the item's summary, and not as its content."),
    ] = None
    generate_summary: Annotated[Literal["auto", "detailed"] | None, about("The older name of summary.")] = None
    context: Annotated[Literal["auto"] | None, about("The chat template decides which reasoning it shows.")] = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(msgspec.Struct):
    """Options of a streamed response."""

    include_obfuscation: Annotated[
        bool | None, about("Deltas get a field that makes their sizes say less about their text.")
    ] = None


class ResponseRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/responses."""

    input: Annotated[
        str | Annotated[list[InputItem], msgspec.Meta(extra_json_schema={"minItems": 1})],
        about("What the user says, or the items of a conversation."),
    ]
    instructions: Annotated[
        str | None, about("The system message. It is not carried over to a response that continues this one.")
    ] = None
    previous_response_id: Annotated[str | None, about("The stored response that this one continues.")] = None
    store: Annotated[bool | None, about("Keep the response, to read or continue it later; unset: true.")] = None
    background: Annotated[bool | None, about("Answer at once, and make the response meanwhile.")] = None
    include: Annotated[list[Includable] | None, about("More to be told.")] = None
    max_output_tokens: Annotated[
        int | None, about("Most tokens of the answer, those of reasoning among them.", minimum=1)
    ] = None
    max_tool_calls: Annotated[
        int | None, about("Most calls of built-in tools, of which Atlas makes none.", minimum=0)
    ] = None
    top_logprobs: Annotated[
        int | None,
        about("Tell the log-probability of each token, and so many of the likeliest.", minimum=0, maximum=MAX_LOGPROBS),
    ] = None
    tools: Annotated[list[ResponseTool] | None, about("What the model may call.")] = None
    tool_choice: Annotated[
        ResponseToolChoice | None, about("Which tool, if any; one of a namespace as NAMESPACE.NAME.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("The answer may have several calls; unset: true.")] = None
    text: TextOptions | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("As in a chat request.")] = None
    enable_thinking: Annotated[bool | None, about("As in a chat request.")] = None
    thinking_budget: Annotated[int | None, about("As in a chat request.", minimum=0)] = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[
        dict[str, str] | None,
        about("Given back with the response.", maxProperties=MAX_METADATA),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        about("auto: a conversation that does not fit loses its beginning; else it is refused."),
    ] = None
    service_tier: Annotated[Literal["auto", "default"] | None, about("There is one.")] = None
    safety_identifier: Annotated[str | None, about("Given back; the answer does not depend on it.")] = None
    prompt_cache_key: Annotated[str | None, about("Given back; nothing depends on it.")] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "24h"] | None, about("An upper bound; no prompt is kept.")
    ] = None

    @property
    def kept(self) -> bool:
        """Whether it is stored."""
        return self.store is not False

    @property
    def summarised(self) -> bool:
        """Whether reasoning goes into the summary."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def tells_logprobs(self) -> bool:
        """Whether log-probabilities are told."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


REFUSED: Mapping[str, tuple[Any, ...]] = {
    # Known fields without support, with the values (besides null) that ask for nothing.
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
}

_INTEGERS = ("max_output_tokens",)
# Parts of an answer that clients send back with the history. They say nothing when empty.
_EMPTY_IN_HISTORY = frozenset(
    f"input[].{name}"
    for name in (
        "phase",
        "async",
        "async_",
        "caller",
        "created_by",
        "namespace",
        "parsed_arguments",
        "content[].parsed",
    )
)


def parse(body: bytes) -> tuple[ResponseRequest, list[str]]:
    """A request body and the paths of the fields in it that nothing reads. Raises ApiError 400."""
    value = decode(body)
    normalise(value)
    not_offered = normalise_tools(value)
    _check_kinds(value)
    request = convert(value, ResponseRequest, REFUSED, _INTEGERS)
    ignored = not_offered + unknown_fields(value, ResponseRequest, _EMPTY_IN_HISTORY)
    _check(request)
    return request, ignored


def _check_kinds(value: dict[str, Any]) -> None:
    """Refuse by name what OpenAI's API has and Atlas has not, which a type error would not explain."""
    tier = value.get("service_tier")
    if isinstance(tier, str) and tier not in ("auto", "default"):
        raise unsupported("service_tier", repr(tier[:80]))
    text, reasoning = value.get("text"), value.get("reasoning")
    if isinstance(text, dict) and text.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", repr(text["verbosity"])[:80])
    for name, accepted in _REASONING.items():
        if isinstance(reasoning, dict) and reasoning.get(name) not in (None, *accepted):
            fix = f"say {' or '.join(repr(one) for one in accepted)}, or leave it out"
            raise unsupported(f"reasoning.{name}", repr(reasoning[name])[:80], fix)


_REASONING = {
    "summary": ("auto", "detailed"),
    "generate_summary": ("auto", "detailed"),
    "context": ("auto",),
    "mode": ("standard",),
}


def _check(request: ResponseRequest) -> None:
    """What a type does not say."""
    if request.input == []:
        raise invalid("input", "empty", "a text, or at least one item", code="empty_array")
    if request.background and not request.kept:
        raise invalid("background", "true, but store is false", "a response in the background is stored")
    if request.stream_options is not None and request.stream_options.include_obfuscation and not request.stream:
        raise invalid("stream_options.include_obfuscation", "true, but stream is not", "what concerns streams in one")
    reasoning = request.reasoning
    if reasoning is not None and reasoning.summary and reasoning.generate_summary not in (None, reasoning.summary):
        found = f"{reasoning.generate_summary!r}, but reasoning.summary is {reasoning.summary!r}"
        raise invalid("reasoning.generate_summary", found, "one of the two, or equal values")
    if request.max_tool_calls is not None and request.max_tool_calls < 0:
        raise invalid("max_tool_calls", str(request.max_tool_calls)[:40], "an integer of at least 0")
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"{len(metadata)} entries", f"at most {MAX_METADATA}")
    for key, value in metadata.items():
        for what, text, most in (("key", key, MAX_METADATA_KEY), ("value", value, MAX_METADATA_VALUE)):
            if len(text) > most:
                where = "metadata" if what == "key" else f"metadata.{key}"
                raise invalid(where, f"a {what} of {len(text)} characters", f"at most {most}")


def chat_request(request: ResponseRequest, conversation: Conversation) -> tuple[ChatRequest, dict[str, str]]:
    """The same as a chat request, and what its fields are called in this one. Raises ApiError 400."""
    reasoning, functions = request.reasoning, functions_of(request.tools or ())
    common = {name: getattr(request, name) for name in SamplingFields.__struct_fields__}
    chat = ChatRequest(
        **common,
        messages=conversation.messages,
        max_tokens=request.max_output_tokens,
        logprobs=request.tells_logprobs or None,
        top_logprobs=request.top_logprobs,
        tools=[tool for tool, _ in functions],
        tool_choice=choice_of(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text.format if request.text else None),
        reasoning_effort=reasoning.effort if reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
        enable_thinking=request.enable_thinking,
        thinking_budget=request.thinking_budget,
    )
    names = {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "tool_choice.allowed_tools": "tool_choice",
        "tool_choice.function": "tool_choice",
    }
    names |= {f"messages[{position}]": where for position, where in enumerate(conversation.where)}
    names |= {f"tools[{place}].function": where for place, (_, where) in enumerate(functions)}
    names |= {
        f"messages[{position}].tool_calls": f"{where}.function_call"
        for position, where in enumerate(conversation.where)
        if conversation.messages[position].tool_calls
    }
    if isinstance(request.tool_choice, AllowedFunctions):
        there = "tool_choice.allowed_tools.tools"
        places = range(len(request.tool_choice.tools))
        names |= {f"{there}[{place}].function": f"tool_choice.tools[{place}]" for place in places}
    return chat, names


def _response_format(given: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> dict[str, Any] | None:
    match given:
        case JsonSchemaFormat():
            inside = {name: value for name, value in msgspec.to_builtins(given).items() if name != "type"}
            return {"type": "json_schema", "json_schema": inside}
        case JsonObjectFormat():
            return {"type": "json_object"}
    return None
