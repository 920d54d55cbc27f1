"""Request bodies of the chat and text completions of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from atlas.engine.sampling import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_TEMPERATURE,
    REPETITION_RANGE,
)
from atlas.serve import body as body_module
from atlas.serve.reference.unknown_fields import Unread
from atlas.text.messages import ChatMessage
from atlas.text.tools import MAX_TOOLS, Tool, ToolChoice

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024


def about(description: str, **schema: Any) -> msgspec.Meta:
    """What the API's documents say about a field: a sentence, and JSON Schema beyond its type.

    Only said here: the checks, whose errors say more than msgspec's, stand where the field is used.
    """
    if "anyOf" in schema:  # msgspec writes that of the type, so this one has to stand beside it
        schema["allOf"] = [{"anyOf": schema.pop("anyOf")}]
    return msgspec.Meta(description=description, extra_json_schema=schema or None)


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_TOKEN = {"type": "integer", "minimum": 0}
_PENALTY = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}


PROMPTS = [
    {"type": "string"},
    {"type": "array", "items": _TOKEN, "minItems": 1},
    {
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TOKEN, "minItems": 1}]},
        "minItems": 1,
    },
]


Temperature = Annotated[
    float | None, about("Logits are divided by it; 0 takes the likeliest.", minimum=0, maximum=MAX_TEMPERATURE)
]
TopP = Annotated[float | None, about("Keep the likeliest tokens that make up this probability.", minimum=0, maximum=1)]
TopK = Annotated[int | None, about("Keep so many of the likeliest tokens; 0 or -1 for all.", minimum=-1)]
"""Fields that Anthropic's API has by the same names."""


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: Annotated[bool | None, about("A last chunk tells the tokens used.")] = None
    continuous_usage_stats: Annotated[bool | None, about("Every chunk tells the tokens used so far.")] = None
    include_obfuscation: Annotated[
        bool | None, about("true is refused: chunks are not padded against observers of their size.")
    ] = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What all generating endpoints of this API have in common. `None` is the same as leaving a field out."""

    model: Annotated[str | None, about("The served model's name.")] = None
    min_tokens: Annotated[int | None, about("No end token before so many.", minimum=0)] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: Annotated[
        float | None, about("Keep tokens at least so likely, relative to the likeliest.", minimum=0, maximum=1)
    ] = None
    repetition_penalty: Annotated[
        float | None,
        about(
            "Above 1: tokens of prompt and answer become less likely.",
            minimum=REPETITION_RANGE[0],
            maximum=REPETITION_RANGE[1],
        ),
    ] = None
    presence_penalty: Annotated[float | None, about("Subtracted for tokens that the answer has.", **_PENALTY)] = None
    frequency_penalty: Annotated[
        float | None, about("Subtracted for each time that the answer has a token.", **_PENALTY)
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        about(
            "Added to the logits of tokens, by their ids.",
            additionalProperties={"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        ),
    ] = None
    seed: Annotated[
        int | None,
        about("The same seed gives the same answer, whatever else runs.", minimum=-(2**63), maximum=2**63 - 1),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        about(
            "The answer ends before any of these.",
            anyOf=[_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}],
        ),
    ] = None
    stop_token_ids: Annotated[list[int] | None, about("Tokens that end the answer.", items=_TOKEN)] = None
    include_stop_str_in_output: Annotated[bool | None, about("The stop string stays in the answer.")] = None
    ignore_eos: Annotated[bool | None, about("The model's own end tokens do not end the answer.")] = None
    priority: Annotated[
        int | None,
        about("Lower ones run first. Least: --min-priority, 0 unless set.", minimum=-(2**63), maximum=2**63 - 1),
    ] = None
    stream: Annotated[bool | None, about("Answer with server-sent events, as the text comes.")] = None
    user: Annotated[str | None, about("Who asks, in the client's own words; the answer does not depend on it.")] = None
    structured_outputs: Annotated[
        Any, about("What the answer must be, in vLLM's words: one of json, regex, choice, grammar, json_object.")
    ] = None
    guided_json: Annotated[Any, about("The answer is JSON that this schema, an object or its text, accepts.")] = None
    guided_regex: Annotated[Any, about("The whole answer matches this regular expression.")] = None
    guided_choice: Annotated[Any, about("The answer is one of these strings.")] = None
    guided_grammar: Annotated[Any, about("The answer is a text of this grammar, in Lark's or GBNF's notation.")] = None
    json_schema: Annotated[Any, about("The same as guided_json.")] = None
    regex: Annotated[Any, about("The same as guided_regex.")] = None
    ebnf: Annotated[Any, about("The same as guided_grammar.")] = None
    grammar: Annotated[Any, about("The same as guided_grammar.")] = None


class GenerationFields(SamplingFields, kw_only=True):
    """What chat and text completions have in common."""

    n: Annotated[
        int | None, about("Answers to each prompt; they are independent draws.", minimum=1, maximum=MAX_CHOICES)
    ] = None
    max_tokens: Annotated[
        int | None,
        about("Most tokens of an answer; null for all that fit, and more than fit is cut to that.", minimum=0),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        about(
            "Tell the log-probabilities of the prompt's tokens, and so many of the likeliest at each place.",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    stream_options: StreamOptions | None = None
    safety_identifier: Annotated[str | None, about("The newer name of user.")] = None
    prompt_cache_key: Annotated[
        str | None, about("A hint which prompts begin alike; the answer does not depend on it.")
    ] = None
    metadata: Annotated[
        dict[str, Any] | None, about("Notes that OpenAI keeps with stored answers; the answer does not depend on them.")
    ] = None
    response_format: Annotated[
        Any, about("What the answer must be: type text, json_object, json_schema (with its json_schema) or grammar.")
    ] = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(msgspec.Struct):
    """`reasoning`, the object that routers of models have: how much, or at most how many tokens."""

    effort: Effort | None = None
    max_tokens: int | None = None
    enabled: bool | None = None


class ThinkingOptions(msgspec.Struct):
    """`thinking`, the object that several vendors have."""

    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], about("The conversation.", minItems=1)]
    max_completion_tokens: Annotated[int | None, about("The newer name of max_tokens.", minimum=0)] = None
    logprobs: Annotated[bool | None, about("Tell the log-probability of each token.")] = None
    top_logprobs: Annotated[
        int | None,
        about("With logprobs: so many of the likeliest at each place.", minimum=0, maximum=MAX_LOGPROBS),
    ] = None
    tools: Annotated[list[Tool] | None, about("Functions that the model may call.", maxItems=MAX_TOOLS)] = None
    tool_choice: Annotated[
        ToolChoice | None, about("Whether calls may, must or must not be made; an object: this one must.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("false: the first complete call ends the answer.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("More variables for the chat template.")] = None
    add_generation_prompt: Annotated[
        bool | None, about("false: the prompt ends with the last message, and not with the beginning of an answer.")
    ] = None
    continue_final_message: Annotated[
        bool | None, about("The answer goes on with the last message, an assistant's, and does not repeat it.")
    ] = None
    enable_thinking: Annotated[bool | None, about("The chat template's own switch of reasoning.")] = None
    reasoning_effort: Annotated[
        Effort | None, about("For the chat template; one that has only a switch is turned off by none, else on.")
    ] = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    thinking_budget: Annotated[int | None, about("Tokens after which reasoning is ended.", minimum=0)] = None
    thinking_token_budget: Annotated[int | None, about("The same as thinking_budget.", minimum=0)] = None
    max_thinking_tokens: Annotated[int | None, about("The same as thinking_budget.", minimum=0)] = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | list[Any], about("A text, several, token ids, or several lists of them.", anyOf=PROMPTS)]
    logprobs: Annotated[
        int | bool | None,
        about(
            "Tell the log-probability of each token, and so many of the likeliest at each place.",
            anyOf=[{"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}, {"const": False}, {"type": "null"}],
        ),
    ] = None
    echo: Annotated[bool | None, about("The prompt stands before the answer.")] = None
    best_of: Annotated[
        int | None,
        about(
            "Make so many answers to each prompt and return the n with the highest mean log-probability; no stream.",
            minimum=1,
            maximum=MAX_CHOICES,
        ),
    ] = None


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # Known fields without support, with the values (besides null) that ask for nothing.
    "chat_template": (),
}

_NEUTRAL_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    # The longest time that is allowed, and the default: what is cached here lives as long as the process at most.
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
}

_NEUTRAL_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "chat_template_kwargs": ({},),
    "suffix": ("",),
}

# Parts of an answer that clients send back with the history. They say nothing when empty.
_EMPTY_IN_HISTORY = frozenset(f"messages[].{name}" for name in ("refusal", "annotations", "audio", "function_call"))

_FORMAT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "grammar": ("grammar",),
}

_INTEGERS = ("max_tokens", "max_completion_tokens")

Request = TypeVar("Request", ChatRequest, CompletionRequest)


def refused(kind: type[Request]) -> Mapping[str, tuple[Any, ...]]:
    """Fields that are known but not supported, with the values, besides null, that ask for nothing."""
    return _NEUTRAL_CHAT if kind is ChatRequest else _NEUTRAL_COMPLETION


def parse(body: bytes, kind: type[Request]) -> tuple[Request, list[str]]:
    """A request body and the paths of the fields in it that nothing reads. Raises ApiError 400."""
    request, ignored = body_module.parse(body, kind, refused(kind), _INTEGERS, _EMPTY_IN_HISTORY)
    return request, ignored + _unread_of_format(request.response_format)


def _unread_of_format(given: Any) -> list[Unread]:
    """The paths of what nothing reads in a response format, which has no struct: its errors say more."""
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        return []
    unread = _unread_in(given, "response_format", ("type", *_FORMAT_FIELDS[kind]))
    if kind == "json_schema" and isinstance(inside := given.get("json_schema"), dict):
        unread += _unread_in(inside, "response_format.json_schema", ("name", "description", "schema", "strict"))
    return unread


def _unread_in(given: dict[str, Any], where: str, names: tuple[str, ...]) -> list[Unread]:
    known = frozenset(names)
    there = (name for name, value in given.items() if value is not None)
    return [Unread(f"{where}.{name}", siblings=known) for name in there if name not in known]
