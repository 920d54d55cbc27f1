"""A response that is being made: from the engine's deltas to events, and at the end into the store."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Literal, TypeVar

import msgspec

from atlas.engine.messages import SamplingParams
from atlas.serve.access.limits import Account
from atlas.serve.chat_generation import Prepared
from atlas.serve.errors import ApiError
from atlas.serve.generation import Delta, generate_all
from atlas.serve.openai.logprobs import chat_logprobs
from atlas.serve.openai.response_events import StreamEvent, encode
from atlas.serve.openai.response_store import Record
from atlas.serve.openai.responses_items import Item
from atlas.serve.openai.responses_objects import (
    ResponseError,
    ResponseInputTokens,
    ResponseObject,
    ResponseOutputTokens,
    ResponseUsage,
)
from atlas.serve.openai.responses_request import SEALED, ReasoningSettings, ResponseRequest, TextFormat, TextOptions
from atlas.serve.openai.responses_tools import WebSearchTool, names_apart
from atlas.serve.openai.responses_writer import ResponseWriter
from atlas.serve.service import Service, Serving
from atlas.serve.telemetry import tracking

logger = logging.getLogger("atlas.serve")

_BYTES_PER_LOGPROBS = 50
_BYTES_ENCODED = 16
"""A token's log-probabilities are as much work to encode as so many bytes of a request; and so many of what a request
has, which its response repeats, as one."""

T = TypeVar("T")

_encoder = msgspec.json.Encoder()


class Input(msgspec.Struct, frozen=True):
    """The items of a request as the store keeps them: their JSON, and their ids. size: of all that was asked, bytes."""

    json: bytes
    ids: tuple[str, ...]
    size: int

    @classmethod
    def of(cls, items: Sequence[Item], size: int) -> Input:
        """items: complete. Blocks: see `Frontend.run`."""
        return cls(_encoder.encode(items), tuple([item.id for item in items if item.id is not None]), size)


class Making:
    """One response on its way. `events` may be iterated once."""

    def __init__(
        self,
        service: Service,
        serving: Serving,
        client: str,
        request: ResponseRequest,
        prepared: Prepared,
        given: Input,
        history: Sequence[Record],
    ) -> None:
        """history: the responses that this one continues, oldest first. Blocks: see `Frontend.run`."""
        (self._job,) = prepared.jobs
        self._serving, self._store, self._client = serving, service.responses, client
        self._kept, self._given, self.history = request.kept, given, history
        opening = _opening(service.config.model_name, request, self._job.sampling)
        sealed = SEALED in (request.include or ())
        apart = names_apart(request.tools or ())
        self.writer = ResponseWriter(opening, summary=request.summarised, sealed=sealed, apart=apart)
        self._tokens = self._reasoning_tokens = 0
        self._reported = 0  # log-probabilities: where there are any, most of what there is to encode

    @property
    def prompt_tokens(self) -> int:
        return len(self._job.prompt)

    @property
    def ended(self) -> bool:
        """Whether the response is as it will stay."""
        return self.writer.response.status not in ("queued", "in_progress")

    async def events(self, account: Account) -> AsyncGenerator[list[StreamEvent], None]:
        """All events after the first (`writer.begin`), those that come together as one list. Raises ApiError where the
        engine fails: how that is told is for the caller to say (`fail`)."""
        yield self.writer.start()
        reason = None
        jobs, tokenizer = [self._job], self._serving.frontend.tokenizer
        async with aclosing(generate_all(self._serving.engine, tokenizer, jobs, account)) as deltas:
            async for delta in deltas:
                reason = delta.finish_reason
                if events := self._take(delta):
                    yield events
        yield self.writer.complete(self._usage(), cut=reason == "length")

    def fail(self, error: ApiError) -> list[StreamEvent]:
        """The last event, where `events` raised this."""
        tracking.failed(error.body.code)
        code: Literal["rate_limit_exceeded", "server_error"]
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return self.writer.fail(ResponseError(code, error.body.message))

    def fault(self) -> list[StreamEvent]:
        """The last event, where it broke by a fault of our own: the exception that is being handled."""
        logger.exception("a response broke off")
        return self.fail(ApiError(500, "internal_error", "the server failed while it made this response"))

    async def keep(self, record: Record) -> None:
        """Store what `record` gave when the response had ended, unless the request said not to."""
        if self._kept:
            await self._store.put(self._client, record, self.history)

    async def encoded(self, events: Iterable[StreamEvent]) -> list[bytes]:
        """Events as they go over the wire. The first, which repeat the request, and the last, which have the whole
        answer, are worded in a thread where that would stall others."""

        def work() -> list[bytes]:
            return [encode(event) for event in events]

        return await self._run(work) if self.ended or not self._tokens else work()

    async def recorded(self, events: Iterable[bytes] = (), first_event: int = 0) -> Record:
        """The response as it is now, for the store. events: those of its stream, from the number `first_event` on."""
        response = self.writer.response  # is replaced, never changed, while a thread words it

        def work() -> Record:
            ids = tuple([item.id for item in response.output if item.id is not None])
            return Record(
                response.id,
                _encoder.encode(response),
                self._given.json,
                self._given.ids + ids,
                response.previous_response_id,
                tuple(events),
                first_event,
            )

        return await self._run(work)

    async def _run(self, work: Callable[[], T]) -> T:
        size = _BYTES_PER_LOGPROBS * self._reported + self._given.size // _BYTES_ENCODED
        return await self._serving.frontend.run(work, size)

    def _take(self, delta: Delta) -> list[StreamEvent]:
        self._tokens += delta.tokens
        self._reasoning_tokens += delta.reasoning_tokens
        if not delta.logprobs or delta.reasoning_tokens:  # where log-probabilities are told, a delta is one token
            return self.writer.add(delta.events)
        logprobs = chat_logprobs(delta.logprobs, self._serving.frontend.tokenizer).content
        self._reported += len(logprobs)
        return self.writer.add(delta.events, logprobs)

    def _usage(self) -> ResponseUsage:
        prompt, tokens = self.prompt_tokens, self._tokens
        details = ResponseOutputTokens(self._reasoning_tokens)
        return ResponseUsage(prompt, ResponseInputTokens(), tokens, details, prompt + tokens)


def _opening(model: str, request: ResponseRequest, sampling: SamplingParams) -> ResponseObject:
    """The response before there is anything of it, the request's fields as they took effect."""
    reasoning, text = request.reasoning or ReasoningSettings(), request.text or TextOptions()
    choice = request.tool_choice
    return ResponseObject(
        id=f"resp_{secrets.token_hex(24)}",
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        model=model,
        background=bool(request.background),
        store=request.kept,
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        safety_identifier=request.safety_identifier,
        temperature=sampling.temperature,
        text={"format": msgspec.to_builtins(text.format or TextFormat()), "verbosity": "medium"},
        tool_choice=choice if isinstance(choice, str) else msgspec.to_builtins(choice) if choice else "auto",
        tools=[msgspec.to_builtins(tool) for tool in request.tools or () if not isinstance(tool, WebSearchTool)],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )
