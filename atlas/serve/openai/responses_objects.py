"""Bodies of answers of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from atlas.serve.openai.responses_items import Item, OutputItem

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed. code: one of the API's own."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseInputTokens(msgspec.Struct, frozen=True):
    """cached_tokens: of the prompt, those that had not to be computed. Writing to the cache is not counted."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ResponseOutputTokens(msgspec.Struct, frozen=True):
    """reasoning_tokens: of the answer, those that the model wrote for itself."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens of the prompt and of the answer, end tokens included."""

    input_tokens: int
    input_tokens_details: ResponseInputTokens
    output_tokens: int
    output_tokens_details: ResponseOutputTokens
    total_tokens: int


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response, from `queued` to its end; the request's fields are repeated as they took effect. Times are epoch
    seconds."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    model: str
    background: bool
    store: bool
    previous_response_id: str | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/responses/{id}/input_items."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
