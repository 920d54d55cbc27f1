"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atlas.engine.messages import TokenLogprobs
from atlas.engine.sampling import MAX_CHOICES
from atlas.serve.errors import invalid
from atlas.serve.generation import Delta, Job, Reported, Whole
from atlas.serve.grammars import grammar_of
from atlas.serve.jobs import make_jobs, sampling_of
from atlas.serve.openai.answers import CompletionChoice, CompletionLogprobs, PromptLogprobs
from atlas.serve.openai.logprobs import completion_logprobs, prompt_logprobs
from atlas.serve.openai.prompts import MAX_PROMPTS, encode_prompt, split
from atlas.serve.openai.requests import CompletionRequest, parse
from atlas.serve.openai.respond import Asked, Pick, respond, zip_all
from atlas.serve.sampling import SamplingRequest
from atlas.serve.service import Service, Serving
from atlas.tokenizer import Tokenizer


class CompletionFormat:
    """How text completions are worded. told: with log-probabilities.  prompt_logprobs: of so many tokens for each of
    the prompt's."""

    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, told: bool, prompt_logprobs: int | None) -> None:
        self._tokenizer, self._told, self._prompt_logprobs = tokenizer, told, prompt_logprobs

    def choice(self, job: Job, whole: Whole) -> CompletionChoice:
        logprobs = self._logprobs(job, whole.logprobs, whole.prompt)
        text = (job.echo or "") + whole.answer.content
        return CompletionChoice(job.index, text, whole.finish_reason, logprobs, self._prompt(whole.prompt))

    def chunks(self, job: Job, delta: Delta) -> list[CompletionChoice]:
        if not delta.events and not delta.logprobs and delta.prompt is None and delta.finish_reason is None:
            return []
        echoed = job.echo if delta.prompt is not None else None
        logprobs = None
        if delta.logprobs or echoed is not None:
            logprobs = self._logprobs(job, delta.logprobs, delta.prompt)
        text = (echoed or "") + delta.text
        return [CompletionChoice(job.index, text, delta.finish_reason, logprobs, self._prompt(delta.prompt))]

    def opening(self, job: Job) -> None:
        return None

    def _logprobs(
        self, job: Job, reported: list[Reported], prompt: list[TokenLogprobs] | None
    ) -> CompletionLogprobs | None:
        n_top = job.sampling.logprobs
        if n_top is None or not self._told:  # best_of has asked for its own use
            return None
        echo = job.echo or ""
        entries: list[tuple[int, TokenLogprobs | None, int]] = []
        if job.echo is not None and prompt is not None:
            offsets = _offsets(job.prompt, echo, self._tokenizer)
            entries += zip(job.prompt, [None, *prompt], offsets, strict=True)
        entries += [(entry.token.token_id, entry.token, len(echo) + entry.offset) for entry in reported]
        return completion_logprobs(entries, n_top, self._tokenizer)

    def _prompt(self, reports: list[TokenLogprobs] | None) -> PromptLogprobs | msgspec.UnsetType:
        n_top = self._prompt_logprobs  # not the job's: an echo may have asked for more
        if reports is None or n_top is None:
            return msgspec.UNSET
        return prompt_logprobs(reports, n_top, self._tokenizer)


def _offsets(prompt: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Where each token of a prompt begins in its text."""
    stream, offsets, length = tokenizer.stream(), [], 0
    for token_id in prompt:
        offsets.append(min(length, len(text)))
        length += len(stream.push([token_id]))
    return offsets


async def completions(http: Request, service: Service) -> Response:
    """Continue one or several prompts, given as text or as token ids."""
    serving = service.require()
    asked, form, pick = await _ask(http, service, serving)
    return await respond(http, service, serving, asked, form, pick)


async def _ask(http: Request, service: Service, serving: Serving) -> tuple[Asked, CompletionFormat, Pick]:
    (request, ignored), size = await serving.frontend.read(http, partial(parse, kind=CompletionRequest))
    headers = service.report_ignored(ignored)
    service.check_model(request.model)
    ready = serving.ready
    sampling = await sampling_of(service, serving, request, serving.frontend.defaults, size)
    n, sampling = sampling.n, _with_best_of(request, sampling)
    parts = split("prompt", request.prompt)
    if len(parts) * sampling.n > MAX_PROMPTS:
        name = "n" if sampling.n == n else "best_of"
        raise invalid(name, f"{sampling.n} for {len(parts)} prompts", f"at most {MAX_PROMPTS} choices in all")
    tokenizer = serving.frontend.tokenizer

    def encode() -> list[tuple[list[int], str | None]]:
        prompts = [encode_prompt(serving, where, prompt) for where, prompt in parts]
        return [(ids, _echo(prompt, ids, tokenizer, request)) for (_, prompt), ids in zip(parts, prompts, strict=True)]

    prompts = await serving.frontend.run(encode, size)
    wanted = await serving.frontend.run(partial(grammar_of, request), size)
    if wanted is not None:
        params = msgspec.structs.replace(sampling.params, grammar=await serving.frontend.grammars.check(wanted))
        sampling = msgspec.structs.replace(sampling, params=params)
    echoes, field = [echo for _, echo in prompts], wanted.where if wanted else ""
    made = partial(make_jobs, [ids for ids, _ in prompts], sampling, ready.max_context, echoes, field)
    jobs, notes = await serving.frontend.run(made, size)
    told = request.logprobs is not None and request.logprobs is not False
    form = CompletionFormat(tokenizer, told=told, prompt_logprobs=request.prompt_logprobs)
    pick = partial(best, n=n, of=sampling.n) if sampling.n > n else zip_all
    return Asked.of(request, jobs, headers | notes), form, pick


def _with_best_of(request: CompletionRequest, sampling: SamplingRequest) -> SamplingRequest:
    """So many choices are made as `best_of` says, and are told apart by their log-probabilities."""
    n, of = sampling.n, request.best_of
    if of is None or of == n:
        return sampling
    if not n < of <= MAX_CHOICES:
        raise invalid("best_of", str(of)[:40], f"an integer from n, {n}, to {MAX_CHOICES}")
    if request.stream:
        raise invalid("best_of", f"{of} of a stream", f"{n}: which answers are best is known when all have ended")
    params = sampling.params
    if params.logprobs is None:
        params = msgspec.structs.replace(params, logprobs=0)
    return msgspec.structs.replace(sampling, params=params, n=of)


def best(jobs: Sequence[Job], wholes: Sequence[Whole], *, n: int, of: int) -> list[tuple[Job, Whole]]:
    """Of each prompt's `of` choices the `n` with the highest mean log-probability, the best first."""
    picked = []
    pairs = zip_all(jobs, wholes)
    for first in range(0, len(pairs), of):
        ranked = sorted(pairs[first : first + of], key=lambda pair: -_mean_logprob(pair[1]))
        picked += ranked[:n]
    return [(msgspec.structs.replace(job, index=index), whole) for index, (job, whole) in enumerate(picked)]


def _mean_logprob(whole: Whole) -> float:
    values = [entry.token.logprob for entry in whole.logprobs]
    return sum(values) / len(values) if values else 0.0


def _echo(prompt: str | list[Any], ids: list[int], tokenizer: Tokenizer, request: CompletionRequest) -> str | None:
    if not request.echo:
        return None
    return prompt if isinstance(prompt, str) else tokenizer.decode(ids)
