"""Token ids in, text out: what every endpoint does between the prompt and its own response format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from typing import Literal, Protocol

import msgspec

from atlas.engine.client import EngineClient, EngineUnavailableError
from atlas.engine.messages import SamplingParams, SequenceOutput, TokenLogprobs
from atlas.parsers import Answer, AnswerParser, CallEnd, Content, Event
from atlas.parsers import collect as answer_of
from atlas.parsers.events import joined
from atlas.serve.access.limits import Account
from atlas.serve.answer_assembler import AnswerAssembler, PlainAssembler
from atlas.serve.errors import ApiError, engine_failed, generation_failed, unavailable
from atlas.serve.telemetry.tracking import Generation
from atlas.text.assembler import Assembler, TextStream

FinishReason = Literal["stop", "length", "tool_calls"]
"""tool_calls: the model stopped, and made complete calls. Cut by max_tokens it is length, whatever came before."""


class StreamTokenizer(Protocol):
    """The part of a tokenizer that generation needs."""

    def stream(self, shown: frozenset[str] = frozenset()) -> TextStream: ...


class Job(msgspec.Struct, frozen=True):
    """One sequence to generate.

    index: its choice in the response.     first: the first choice of its prompt.
    include_stop: a stop string stays in the text.
    echo: text to give back before the answer's own; None: no echo.
    parser: makes what tells reasoning and tool calls from content; None: all is content.
    shown: the words of that parser's formats, whose special tokens must be in the text that it reads.
    one_call: the first complete tool call ends the answer.
    grammar_field: where the sampling's grammar comes from, as the caller's API calls it.
    """

    index: int
    prompt: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    first: bool = True
    include_stop: bool = False
    echo: str | None = None
    parser: Callable[[], AnswerParser] | None = None
    shown: frozenset[str] = frozenset()
    one_call: bool = False
    grammar_field: str = ""


class Reported(msgspec.Struct, frozen=True):
    """A generated token's log-probabilities. offset: characters of the answer's text before it."""

    token: TokenLogprobs
    offset: int


class Delta(msgspec.Struct, frozen=True):
    """What is new in one choice. `tokens` counts the ids behind it; the last delta has the reason.

    events: in the order of the text. Joined with those of the choice's other deltas, they depend on the ids alone.
    reasoning_tokens: of `tokens`, those of reasoning and its markers.
    stop: in the last delta, the stop string that ended the answer; None if it was something else.
    prompt: in the first delta of a job that wants something about its prompt: the log-probabilities of the
        prompt's tokens but the first, none if only the text is wanted.
    """

    index: int
    events: list[Event]
    tokens: int
    finish_reason: FinishReason | None = None
    logprobs: list[Reported] = []
    prompt: list[TokenLogprobs] | None = None
    reasoning_tokens: int = 0
    stop: str | None = None

    @property
    def text(self) -> str:
        """The content among the events."""
        return "".join([event.text for event in self.events if isinstance(event, Content)])


async def generate(
    engine: EngineClient, tokenizer: StreamTokenizer, job: Job, account: Account
) -> AsyncGenerator[Delta, None]:
    """The deltas of one sequence, its tokens put on the account. Closing the iterator aborts it. Raises ApiError 500 if
    it breaks, 503 if there is no engine or the server shuts down, 504 if its time is over: after the deltas of all
    tokens that there were by then.
    """
    assembler = _assembler(tokenizer, job)
    called, reasoned = False, 0
    try:
        submitted = engine.submit(job.prompt, job.sampling)
    except EngineUnavailableError as error:  # it died while the prompt was being made
        raise unavailable("engine_unavailable", str(error)) from None
    account.streams.append(submitted)
    prompt: list[TokenLogprobs] = []
    logprobs: list[Reported] = []
    opened = job.echo is None and job.sampling.prompt_logprobs is None
    waiting = True
    with Generation(len(job.prompt), job.sampling.max_tokens, job.first) as seen, submitted as stream:
        # Of a token whose log-probabilities are told, it must be seen what it is part of.
        apart = job.parser is not None and job.sampling.logprobs is not None
        async for output in _one_by_one(stream) if apart else stream:
            broken: ApiError | None = None
            if output.finish_reason in ("error", "abort"):
                broken = account.expired or failure(engine, output, job.grammar_field)
                if waiting and not output.token_ids:
                    raise broken
                output = msgspec.structs.replace(output, finish_reason="length")
            if output.prompt_logprobs:
                prompt += output.prompt_logprobs
            if not output.token_ids and output.finish_reason is None:
                continue  # the prompt is still being computed
            if waiting:
                account.leave_queue()
                waiting = False
            if not opened:
                yield Delta(job.index, [], 0, prompt=prompt)
                opened = True
            events, tokens, reason = assembler.push(output)
            account.spend(tokens)
            seen.received(tokens, output.timing)
            if broken is not None:
                if reason == "stop":  # the text was complete before
                    broken = None
                else:  # a call that is not complete stays open: nobody shall make it
                    events, reason = [event for event in events if not _is_cut(event)], None
            seen.finish_reason = reason
            if output.logprobs:
                pairs = zip(output.logprobs, assembler.offsets, strict=False)
                logprobs = [Reported(*pair) for pair in pairs][:tokens]
            if len(events) > 1:
                events = joined(events)
            for event in events:
                called = called or (isinstance(event, CallEnd) and event.complete)
            told: FinishReason | None = "tool_calls" if reason == "stop" and called else reason
            thought, reasoned = assembler.reasoning_tokens - reasoned, assembler.reasoning_tokens
            stop = assembler.matched if reason is not None else None
            if tokens or events or broken is None:
                yield Delta(job.index, events, tokens, told, logprobs, None, thought, stop)
            if broken is not None:
                raise broken
            if reason is not None:
                return
            logprobs = []


def _is_cut(event: Event) -> bool:
    return isinstance(event, CallEnd) and not event.complete


async def _one_by_one(stream: AsyncIterable[SequenceOutput]) -> AsyncGenerator[SequenceOutput, None]:
    """The same, each token in an output of its own."""
    async for output in stream:
        if len(output.token_ids) < 2:
            yield output
            continue
        *others, last = zip(output.token_ids, output.logprobs, strict=True)
        timing, prompt_logprobs = output.timing, output.prompt_logprobs
        for token, logprobs in others:
            yield SequenceOutput(
                output.request_id, [token], logprobs=(logprobs,), prompt_logprobs=prompt_logprobs, timing=timing
            )
            timing, prompt_logprobs = None, ()
        rest = {"timing": None, "prompt_logprobs": ()}
        yield msgspec.structs.replace(output, token_ids=[last[0]], logprobs=(last[1],), **rest)


def failure(engine: EngineClient, output: SequenceOutput, grammar_field: str = "") -> ApiError:
    """Why a sequence ended without an answer. grammar_field: as for `Job`."""
    message = output.error or "the engine ended this request"
    if output.finish_reason == "abort":
        return unavailable("server_shutting_down", message)
    if output.by_grammar:
        named = f"{grammar_field}: {message}" if grammar_field else message
        return ApiError(400, "grammar_too_complex", named, grammar_field or None)
    return engine_failed(message) if engine.state == "dead" else generation_failed(message)


def _assembler(tokenizer: StreamTokenizer, job: Job) -> PlainAssembler | AnswerAssembler:
    stream, min_tokens, include_stop = tokenizer.stream(job.shown), job.sampling.min_tokens, job.include_stop
    if job.parser is not None:
        return AnswerAssembler(
            stream, job.parser(), job.stops, min_tokens=min_tokens, include_stop=include_stop, one_call=job.one_call
        )
    offsets = job.sampling.logprobs is not None
    plain = Assembler(stream, job.stops, min_tokens=min_tokens, include_stop=include_stop, offsets=offsets)
    return PlainAssembler(plain)


def generate_all(
    engine: EngineClient, tokenizer: StreamTokenizer, jobs: Sequence[Job], account: Account
) -> AsyncGenerator[Delta, None]:
    """The deltas of several sequences as they come. The first that breaks ends all, once their tokens are told."""
    if len(jobs) == 1:
        return generate(engine, tokenizer, jobs[0], account)
    return _together(engine, tokenizer, jobs, account)


async def _together(
    engine: EngineClient, tokenizer: StreamTokenizer, jobs: Sequence[Job], account: Account
) -> AsyncGenerator[Delta, None]:
    # Where the reader is slow, tokens wait in the engine's streams, where they become one output.
    queue: asyncio.Queue[Delta | Exception] = asyncio.Queue(maxsize=len(jobs))

    async def follow(job: Job) -> None:
        try:
            async with aclosing(generate(engine, tokenizer, job, account)) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
        except Exception as error:  # handed to the reader, which raises it
            await queue.put(error)

    tasks = [asyncio.create_task(follow(job)) for job in jobs]
    try:
        left, broken = len(jobs), None
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                left -= 1
                if broken is None:
                    broken = item
                    account.abort("another choice of the request broke")
                continue
            left -= item.finish_reason is not None
            yield item
        if broken is not None:
            raise broken
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Whole(msgspec.Struct):
    """One choice, complete: the sum of its deltas."""

    answer: Answer
    tokens: int = 0
    finish_reason: FinishReason = "length"
    logprobs: list[Reported] = []
    prompt: list[TokenLogprobs] | None = None
    reasoning_tokens: int = 0
    stop: str | None = None


async def collect(
    engine: EngineClient, tokenizer: StreamTokenizer, jobs: Sequence[Job], account: Account
) -> list[Whole]:
    """All choices, complete, in order."""
    wholes = [Whole(Answer()) for _ in jobs]
    events: list[list[Event]] = [[] for _ in jobs]
    async with aclosing(generate_all(engine, tokenizer, jobs, account)) as deltas:
        async for delta in deltas:
            whole = wholes[delta.index]
            events[delta.index] += delta.events
            whole.tokens += delta.tokens
            whole.reasoning_tokens += delta.reasoning_tokens
            whole.finish_reason = delta.finish_reason or whole.finish_reason
            whole.stop = delta.stop
            whole.logprobs += delta.logprobs
            whole.prompt = delta.prompt if whole.prompt is None else whole.prompt
    for whole, all_events in zip(wholes, events, strict=True):
        whole.answer = answer_of(all_events)
    return wholes
