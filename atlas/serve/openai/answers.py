"""Response bodies of the OpenAI endpoints."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

from atlas.serve.generation import FinishReason


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: of the prompt, those that were not computed anew."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """reasoning_tokens: of the answer, those of reasoning and its markers."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of the prompt and of the answer, end tokens included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class FunctionAnswer(msgspec.Struct, frozen=True):
    """What is called. `arguments` is a JSON object, unless the answer ended inside the call: then it is the beginning
    of one, up to the last argument that is whole."""

    name: str
    arguments: str


class ToolCallAnswer(msgspec.Struct, frozen=True):
    """A tool call of an answer."""

    id: str
    function: FunctionAnswer
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's turn. content: null beside tool calls without any."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallAnswer] | msgspec.UnsetType = msgspec.UNSET


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


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new of a call: its name, then pieces of its arguments."""

    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the answer's call `index`. The first part has id, type and name."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new in a chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


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


Choice = TypeVar("Choice", ChatChoice, ChatChunkChoice, CompletionChoice)


class Answer(msgspec.Struct, Generic[Choice], frozen=True, kw_only=True):
    """A whole response or one chunk. `usage` stays out of chunks unless the client asked for it."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of /v1/models: OpenAI's fields and those of Anthropic's API, which has the same path.

    created, created_at: when the server started.  max_input_tokens, max_tokens: of a prompt alone, of an answer alone;
    together they have max_model_len.
    """

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "atlas"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models: all of them on one page."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    object: Literal["list"] = "list"
    has_more: Literal[False] = False
