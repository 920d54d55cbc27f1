"""Request and response bodies of the OpenAI endpoints, and how a request body is read.

A body is decoded once into plain values and then converted to a struct, so that fields Atlas does not know
can be reported, and fields it knows but does not support can be refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from atlas.serve.errors import ApiError, invalid, unsupported
from atlas.text.assembler import FinishReason
from atlas.text.messages import ChatMessage

# ---- requests ------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common. `None` is the same as leaving a field out."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions. `prompt`: a text, several, token ids, or several lists of them."""

    prompt: str | list[Any]
    logprobs: int | bool | None = None
    echo: bool | None = None


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # Known fields without support yet, with the values (besides null) that ask for nothing.
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "priority": (0,),
}

_NEUTRAL_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "enable_thinking": (),
    "thinking": (),
    "thinking_budget": (),
}

_NEUTRAL_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "suffix": ("",),
    "best_of": (1,),
}

# Parts of an answer that clients send back with the history. They say nothing when empty.
_EMPTY_IN_HISTORY = frozenset({"refusal", "annotations", "audio", "function_call"})

_INTEGERS = ("max_tokens", "max_completion_tokens")
_AT = re.compile(r"(?P<what>.*) - at `(?P<path>\$.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")

Request = TypeVar("Request", ChatRequest, CompletionRequest)


def parse(body: bytes, kind: type[Request]) -> tuple[Request, list[str]]:
    """A request body and the paths of the fields in it that nothing reads. Raises ApiError 400."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise invalid(None, "nested too deeply", code="invalid_json") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise invalid(None, f"not valid JSON: {error}", "a JSON object", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, f"a JSON {_json_name(value)}", "a JSON object", code="invalid_json")
    neutral = _NEUTRAL_CHAT if kind is ChatRequest else _NEUTRAL_COMPLETION
    for name, values in neutral.items():
        if (given := value.pop(name, None)) is not None and not _among(given, values):
            raise unsupported(name, _shorten(given))
    for name in _INTEGERS:
        # Some writers spell large integers 1e18; such a number is whole whatever its type.
        if isinstance(given := value.get(name), float) and abs(given) >= 2**53:
            value[name] = int(given)
    try:
        request = msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _explain(str(error)) from None
    return request, _ignored(value, kind)


def _ignored(value: dict[str, Any], kind: type[msgspec.Struct]) -> list[str]:
    ignored = [name for name in value if name not in kind.__struct_fields__]
    ignored += [
        f"stream_options.{name}"
        for name in value.get("stream_options") or {}
        if name not in StreamOptions.__struct_fields__
    ]
    if kind is ChatRequest:
        in_messages = {
            name: None
            for message in value["messages"]
            for name, given in message.items()
            if name not in ChatMessage.__struct_fields__ and (given or name not in _EMPTY_IN_HISTORY)
        }
        ignored += [f"messages[].{name}" for name in in_messages]
    return ignored


def _among(given: Any, values: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but `"n": true` is not 1.
    return any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in values)


def _explain(text: str) -> ApiError:
    match = _AT.fullmatch(text)
    what, path = (match["what"], match["path"].removeprefix("$").lstrip(".")) if match else (text, "")
    if missing := _MISSING.fullmatch(what):
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return invalid(path, "missing", code="missing_required_parameter")
    if path.endswith("role") and what.startswith("Invalid enum value"):
        roles = "system, developer, user, assistant, tool"
        return invalid(path, what.replace("Invalid enum value", "unknown role"), roles)
    if re.search(r"content\[\d+\]\.type$", path):
        return invalid(path, what, "text parts only", code="unsupported_content")
    return invalid(path or None, what)


def _json_name(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _shorten(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return "this value"
    return text if len(text) <= 60 else text[:57] + "..."


# ---- responses -----------------------------------------------------------------------------------


class Usage(msgspec.Struct, frozen=True):
    """Tokens of the prompt and of the answer, end tokens included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's turn."""

    content: str
    role: str = "assistant"
    refusal: str | None = None


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """One token and what the model thought of it. `token` may stand for part of a character, `bytes` are exact."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob, frozen=True):
    """A generated token, and the likeliest ones at its place."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry for each generated token, the one that ended the answer included."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists with one entry for each token; the first token of an echoed prompt has nulls.

    text_offset: characters of the choice's text before the token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token at one place of the prompt, as vLLM reports it."""

    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, null for the first: it and the likeliest ones, by id."""


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new in a chunk."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer of a text completion, or its part of a chunk."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response or one chunk. `usage` stays out of chunks unless the client asked for it."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of /v1/models."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "atlas"


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
