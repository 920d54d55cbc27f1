"""Request bodies of the chat and text completions of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from atlas.serve import body as body_module
from atlas.text.messages import ChatMessage


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
_EMPTY_IN_HISTORY = frozenset(f"messages[].{name}" for name in ("refusal", "annotations", "audio", "function_call"))

_INTEGERS = ("max_tokens", "max_completion_tokens")

Request = TypeVar("Request", ChatRequest, CompletionRequest)


def parse(body: bytes, kind: type[Request]) -> tuple[Request, list[str]]:
    """A request body and the paths of the fields in it that nothing reads. Raises ApiError 400."""
    neutral = _NEUTRAL_CHAT if kind is ChatRequest else _NEUTRAL_COMPLETION
    return body_module.parse(body, kind, neutral, _INTEGERS, _EMPTY_IN_HISTORY)
