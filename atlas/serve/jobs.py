"""From prompts and a request's checked sampling fields to the sequences that the engine is given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from atlas.engine.sampling_defaults import SamplingDefaults
from atlas.serve.generation import Job
from atlas.serve.openai.requests import ChatRequest, CompletionRequest
from atlas.serve.sampling import SamplingRequest, check
from atlas.serve.service import Service, Serving


async def sampling_of(
    service: Service,
    serving: Serving,
    request: ChatRequest | CompletionRequest,
    defaults: SamplingDefaults,
    body_size: int,
) -> SamplingRequest:
    """A request's sampling fields for the served model. Raises ApiError 400 naming the field."""
    checked = partial(
        check,
        request,
        defaults,
        ends=serving.frontend.tokenizer.eos_token_ids,
        vocab_size=serving.ready.vocab_size,
        seed=service.config.seed,
        min_priority=service.config.min_priority,
    )
    return await serving.frontend.run(checked, body_size)


def make_jobs(
    prompts: Sequence[list[int]],
    sampling: SamplingRequest,
    max_context: int,
    echoes: Sequence[str | None] | None = None,
    grammar_field: str = "",
) -> tuple[list[Job], dict[str, str]]:
    """The choices of each prompt, one after another, and a header that says so where max_tokens had to be cut.

    echoes: for each prompt the text to give back before the answer.  grammar_field: as for `Job`.
    """
    jobs = []
    for position, prompt in enumerate(prompts):
        for choice in range(sampling.n):
            index = position * sampling.n + choice
            params = sampling.fit(index, len(prompt), max_context)
            echo = echoes[position] if echoes is not None else None
            first, stay = choice == 0, sampling.include_stop
            jobs.append(Job(index, prompt, params, sampling.stops, first, stay, echo, grammar_field=grammar_field))
    asked = sampling.max_tokens
    cut = [str(job.sampling.max_tokens) for job in jobs if asked is not None and job.sampling.max_tokens < asked]
    return jobs, {"x-atlas-max-tokens": ", ".join(cut[:64])} if cut else {}
