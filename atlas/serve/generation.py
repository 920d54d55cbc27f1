"""Token ids in, text out: what every endpoint does between the prompt and its own response format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from atlas.engine.client import EngineClient, EngineUnavailableError
from atlas.engine.messages import SamplingParams
from atlas.serve.errors import generation_failed, unavailable
from atlas.text.assembler import Assembler, FinishReason, TextStream


class StreamTokenizer(Protocol):
    """The part of a tokenizer that generation needs."""

    def stream(self) -> TextStream: ...


class Job(msgspec.Struct, frozen=True):
    """One sequence to generate; `index` is its choice in the response."""

    index: int
    prompt: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]


class Delta(msgspec.Struct, frozen=True):
    """What is new in one choice. `tokens` counts the ids behind it; the last delta has the reason."""

    index: int
    text: str
    tokens: int
    finish_reason: FinishReason | None = None


async def generate(engine: EngineClient, tokenizer: StreamTokenizer, job: Job) -> AsyncGenerator[Delta, None]:
    """The deltas of one sequence. Closing the iterator aborts it. Raises ApiError 500 if it breaks, 503 if
    there is no engine.
    """
    assembler = Assembler(tokenizer.stream(), job.stops)
    try:
        submitted = engine.submit(job.prompt, job.sampling)
    except EngineUnavailableError as error:  # it died while the prompt was being made
        raise unavailable("engine_unavailable", str(error)) from None
    with submitted as stream:
        async for output in stream:
            if output.finish_reason in ("error", "abort"):
                raise generation_failed(output.error or "the engine ended this request")
            text, tokens, reason = assembler.push(output)
            yield Delta(job.index, text, tokens, reason)
            if reason is not None:
                return


async def generate_all(
    engine: EngineClient, tokenizer: StreamTokenizer, jobs: Sequence[Job]
) -> AsyncGenerator[Delta, None]:
    """The deltas of several sequences as they come. The first that breaks ends all."""
    if len(jobs) == 1:
        async with aclosing(generate(engine, tokenizer, jobs[0])) as deltas:
            async for delta in deltas:
                yield delta
        return
    queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    async def follow(job: Job) -> None:
        try:
            async with aclosing(generate(engine, tokenizer, job)) as deltas:
                async for delta in deltas:
                    queue.put_nowait(delta)
        except Exception as error:  # handed to the reader, which raises it
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(job)) for job in jobs]
    try:
        left = len(jobs)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Whole(msgspec.Struct):
    """One choice, complete."""

    text: str
    tokens: int
    finish_reason: FinishReason


async def collect(engine: EngineClient, tokenizer: StreamTokenizer, jobs: Sequence[Job]) -> list[Whole]:
    """All choices, complete, in order."""
    texts: list[list[str]] = [[] for _ in jobs]
    tokens = [0] * len(jobs)
    reasons: list[FinishReason] = ["length"] * len(jobs)
    async with aclosing(generate_all(engine, tokenizer, jobs)) as deltas:
        async for delta in deltas:
            texts[delta.index].append(delta.text)
            tokens[delta.index] += delta.tokens
            reasons[delta.index] = delta.finish_reason or reasons[delta.index]
    return [Whole("".join(parts), tokens[i], reasons[i]) for i, parts in enumerate(texts)]
