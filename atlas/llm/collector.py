"""From the engine's outputs to texts: one assembler for each continuation, results in order."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from atlas.engine.messages import TokenLogprobs as EngineLogprobs
from atlas.errors import RequestError
from atlas.llm.engine_thread import Arrival
from atlas.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamOutput, TokenLogprobs
from atlas.llm.prompts import Prompt
from atlas.llm.sampling_params import SamplingParams
from atlas.text.assembler import Assembler, TextStream


class NoText:
    """The text of a model without a tokenizer: none."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclasses.dataclass
class _Choice:
    """One request of the engine."""

    prompt_index: int
    index: int
    assembler: Assembler
    logprobs: bool
    finished: bool = False


class Collector:
    """Follows the requests of one call, numbered prompt by prompt and choice by choice."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        text_stream: Callable[[], TextStream],
        token_text: Callable[[int], str],
    ) -> None:
        self._prompts, self._sampling, self._token_text = prompts, sampling, token_text
        self._choices = [
            _Choice(
                position,
                index,
                Assembler(
                    text_stream(),
                    params.stop,
                    min_tokens=params.min_tokens,
                    include_stop=params.include_stop_str_in_output,
                ),
                params.logprobs is not None,
            )
            for position, params in enumerate(sampling)
            for index in range(params.n)
        ]
        self.unfinished = len(self._choices)

    def take(self, arrival: Arrival) -> tuple[StreamOutput | None, bool]:
        """What is new, if anything is, and whether the request has to be aborted because its text has ended.

        Raises:
            RequestError: the request failed in the engine; it names the prompt.
        """
        choice, output = self._choices[arrival.index], arrival.output
        if choice.finished:
            return None, False
        if output.finish_reason in ("error", "abort"):
            where = self._prompts[choice.prompt_index].where
            raise RequestError(where, output.error or "the engine ended this request")
        text, count, reason = choice.assembler.push(output)
        if reason is not None:
            choice.finished = True
            self.unfinished -= 1
        delta = StreamOutput(
            choice.prompt_index,
            choice.index,
            text,
            output.token_ids[:count],
            reason,
            [self._entry(entry) for entry in output.logprobs[:count]] if choice.logprobs else None,
            [self._entry(entry) for entry in output.prompt_logprobs],
            arrival.time,
        )
        new = text or delta.token_ids or delta.prompt_logprobs or reason
        return delta if new else None, reason is not None and output.finish_reason is None

    def results(self, submitted: float) -> list[RequestOutput]:
        """Empty results, to be filled by `add`."""
        return [
            RequestOutput(
                prompt.text,
                prompt.ids,
                [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)],
                RequestMetrics(submitted),
                None if params.prompt_logprobs is None else [None],
            )
            for prompt, params in zip(self._prompts, self._sampling, strict=True)
        ]

    def _entry(self, entry: EngineLogprobs) -> TokenLogprobs:
        ranked = zip(entry.top_ids, entry.top_logprobs, strict=True)
        result = {
            token: Logprob(logprob, rank, self._token_text(token)) for rank, (token, logprob) in enumerate(ranked, 1)
        }
        result.setdefault(entry.token_id, Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id)))
        return result


def add(result: RequestOutput, delta: StreamOutput) -> None:
    """Append what is new to a prompt's result."""
    output, metrics = result.outputs[delta.index], result.metrics
    output.text += delta.text
    output.token_ids += delta.token_ids
    if output.logprobs is not None and delta.logprobs:
        output.logprobs += delta.logprobs
    if result.prompt_logprobs is not None:
        result.prompt_logprobs += delta.prompt_logprobs
    output.finish_reason = delta.finish_reason
    if delta.token_ids and metrics.first_token != metrics.first_token:
        metrics.first_token = delta.time
    if all(choice.finish_reason for choice in result.outputs):
        metrics.finished = delta.time


def gather(collector: Collector, outputs: Generator[StreamOutput, None, None], progress: bool) -> list[RequestOutput]:
    """The results of all prompts, complete.

    progress: draw a bar on stderr, if that is a terminal.
    """
    from tqdm import tqdm

    results, began, tokens = collector.results(time.perf_counter()), time.perf_counter(), 0
    shown = None if progress else True
    bar = tqdm(total=len(results), unit="prompt", file=sys.stderr, disable=shown, dynamic_ncols=True)
    with bar, closing(outputs):
        for delta in outputs:
            result = results[delta.prompt_index]
            add(result, delta)
            tokens += len(delta.token_ids)
            if not bar.disable:
                rate = tokens / max(time.perf_counter() - began, 1e-9)
                bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                done = delta.finish_reason is not None and all(choice.finish_reason for choice in result.outputs)
                bar.update(int(done))
    return results
