"""Token ids in, text out: what every endpoint does between the prompt and its own response format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from atlas.engine.client import EngineClient, EngineUnavailableError
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.serve.errors import generation_failed, unavailable
from atlas.serve.schemas import FinishReason
from atlas.serve.stop_strings import StopMatcher


class TextStream(Protocol):
    """An incremental detokenizer: ids in, the text that has become complete out."""

    def push(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


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


class Assembler:
    """The text of one sequence: detokenised, cut at a stop string.

    Which text comes out, and how many tokens count, depends on the ids alone and not on how they were
    grouped into outputs; a streamed answer therefore equals the same answer in one piece.
    """

    def __init__(self, text_stream: TextStream, stops: Sequence[str]) -> None:
        self._stream = text_stream
        self._matcher = StopMatcher(stops)
        self._one_by_one = bool(stops)

    def push(self, output: SequenceOutput) -> tuple[str, int, FinishReason | None]:
        """The new text, how many of the output's ids count, and the reason if this is the end."""
        ids, reason = output.token_ids, output.finish_reason
        # The id that ended the sequence counts as generated, but it is no part of the text.
        shown = ids[:-1] if reason == "stop" else ids
        text = ""
        # With stop strings, ids after the one that completes the match must not be counted.
        groups = [[token] for token in shown] if self._one_by_one else [shown]
        for count, group in enumerate(groups, start=1):
            text += self._matcher.feed(self._stream.push(group))
            if self._matcher.matched is not None:
                return text, count, "stop"
        if reason is None:
            return text, len(ids), None
        text += self._matcher.feed(self._stream.finish())
        matched = self._matcher.matched is not None
        text += self._matcher.finish()
        return text, len(ids), "stop" if matched or reason == "stop" else "length"


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
