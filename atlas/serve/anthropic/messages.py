"""POST /v1/messages and /v1/messages/count_tokens: requests become chat requests, answers are worded as messages."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atlas.parsers import Event
from atlas.serve.access.limits import Account, account_of
from atlas.serve.anthropic.answers import (
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    Ping,
    Stop,
    TokenCount,
    Usage,
    event,
)
from atlas.serve.anthropic.events import BlockWriter, Calls, blocks
from atlas.serve.anthropic.requests import Body, Conversation, MessagesRequest, read
from atlas.serve.anthropic.translate import Translation, callers_words, renamed, translate
from atlas.serve.chat_generation import chat_prompt, plan_of, prepare
from atlas.serve.generation import Delta, Job, generate_all
from atlas.serve.http import EventStream, json_response, unless_gone
from atlas.serve.service import Service, Serving

PING = event(Ping())


async def messages(http: Request, service: Service) -> Response:
    """Answer a conversation, streamed or in one piece."""
    serving = service.require()
    asked = await _ask(http, service, serving)
    job, headers, hide_thinking = asked.job, asked.headers, asked.hide_thinking
    tally = _Tally(job, asked.max_tokens)
    frame = Message(
        id="msg_" + secrets.token_hex(12),
        model=service.config.model_name,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=tally.usage(),
    )
    account = account_of(http.scope)
    account.enter_queue(1)
    account.spend(len(job.prompt))
    if asked.stream:
        stream = _stream(serving, job, frame, tally, account, BlockWriter(hide_thinking=hide_thinking))
        return EventStream(stream, headers, end=b"", ping=PING)
    events = await unless_gone(http, _collect(serving, job, tally, account))
    stop = tally.stop()
    whole = msgspec.structs.replace(
        frame,
        content=blocks(events, hide_thinking=hide_thinking),
        stop_reason=stop.stop_reason,
        stop_sequence=stop.stop_sequence,
        usage=tally.usage(),
    )
    return json_response(whole, headers)


class _Asked(msgspec.Struct, frozen=True):
    """What is kept of a request while it is answered. Its body and messages are not: an answer takes long."""

    job: Job
    headers: dict[str, str]
    max_tokens: int
    stream: bool
    hide_thinking: bool


async def _ask(http: Request, service: Service, serving: Serving) -> _Asked:
    with callers_words():
        read = partial(_read, serving, MessagesRequest)
        (request, translation, ignored), size = await serving.frontend.read(http, read)
    with callers_words(translation):
        prepared = await prepare(service, serving, translation.chat, size, ignored=ignored, named=translation.named)
    (job,) = prepared.jobs
    if job.grammar_field:
        job = msgspec.structs.replace(job, grammar_field=renamed(job.grammar_field, translation))
    hides = request.thinking is not None and request.thinking.display == "omitted"
    return _Asked(job, prepared.headers, request.max_tokens, bool(request.stream), hides)


async def count_tokens(http: Request, service: Service) -> Response:
    """How many tokens the prompt of a conversation has: those that `usage` of its answer would tell."""
    serving = service.require()
    frontend = serving.frontend
    with callers_words():
        (_, translation, ignored), size = await frontend.read(http, partial(_read, serving, Conversation))
    chat = translation.chat
    with callers_words(translation):
        service.check_model(chat.model)
        plan = await frontend.run(partial(plan_of, frontend, chat), size)
        unread = (path.renamed(translation.named(path)) for path in plan.unread)
        headers = service.report_ignored([*ignored, *unread])
        # Whatever its length: agent tools ask by how much a conversation has outgrown the context.
        prompt = await chat_prompt(frontend, chat, plan, size, None)
    return json_response(TokenCount(len(prompt.ids)), headers)


def _read(serving: Serving, kind: type[Body], body: bytes) -> tuple[Body, Translation, list[str]]:
    """A body, what it asks for, and the paths of what is not read. Raises ApiError 400."""
    request, ignored = read(body, kind)
    translation = translate(request, serving.frontend.presets)
    return request, translation, ignored + translation.unread


class _Tally:
    """What an answer took, and why it ended."""

    def __init__(self, job: Job, max_tokens: int) -> None:
        self._prompt = len(job.prompt)
        self._cut = job.sampling.max_tokens < max_tokens
        self._generated = self._reasoned = 0
        self._calls = Calls()
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        """What came next."""
        self._generated += delta.tokens
        self._reasoned += delta.reasoning_tokens
        self._calls.feed(delta.events)
        self._last = delta

    def usage(self) -> Usage:
        """Tokens so far."""
        details = OutputTokensDetails(self._reasoned)
        return Usage(input_tokens=self._prompt, output_tokens=self._generated, output_tokens_details=details)

    def stop(self) -> Stop:
        """Why it ended."""
        assert self._last is not None and self._last.finish_reason is not None
        reason, stop = self._last.finish_reason, self._last.stop
        told = self._calls.stop_reason(reason, stop, context_is_full=self._cut)
        return Stop(told, stop if told == "stop_sequence" else None)


async def _stream(
    serving: Serving, job: Job, frame: Message, tally: _Tally, account: Account, writer: BlockWriter
) -> AsyncGenerator[bytes, None]:
    yield event(MessageStart(frame)) + PING
    deltas = generate_all(serving.engine, serving.frontend.tokenizer, [job], account)
    async with aclosing(deltas):
        async for delta in deltas:
            tally.add(delta)
            if news := writer.feed(delta.events):
                yield news
    yield writer.finish() + event(MessageDelta(tally.stop(), tally.usage())) + event(MessageStop())


async def _collect(serving: Serving, job: Job, tally: _Tally, account: Account) -> list[Event]:
    events: list[Event] = []
    deltas = generate_all(serving.engine, serving.frontend.tokenizer, [job], account)
    async with aclosing(deltas):
        async for delta in deltas:
            tally.add(delta)
            events += delta.events
    return events
