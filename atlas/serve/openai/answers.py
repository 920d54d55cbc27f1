"""Response bodies of the OpenAI endpoints."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from atlas.text.assembler import FinishReason


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
