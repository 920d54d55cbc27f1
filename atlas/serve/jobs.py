"""From prompts and a request's checked sampling fields to the sequences that the engine is given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from atlas.engine.sampling_defaults import SamplingDefaults
from atlas.serve.errors import invalid
from atlas.serve.generation import Job
from atlas.serve.openai.requests import ChatRequest, CompletionRequest
from atlas.serve.sampling import SamplingRequest, check
from atlas.serve.service import Service, Serving

MAX_SENT = 1 << 21
"""Token ids that one request may send to the engine, all its sequences together, or four times the context if that is
more. Each is written here and read there between two steps: 15 million, 128 choices of a prompt of 120,000 tokens,
held up everybody for a second."""
_BIAS_WEIGHT, _STOP_WEIGHT = 8, 2
"""What an entry of `logit_bias` or `stop_token_ids` takes, as ids of a prompt (measured: 340, 80 and 65 ns)."""


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

    Raises ApiError 400: all together would be more than MAX_SENT. Blocks: see `Frontend.run`.
    """
    _check_sent(prompts, sampling, max(MAX_SENT, 4 * max_context))
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


def _check_sent(prompts: Sequence[list[int]], sampling: SamplingRequest, most: int) -> None:
    biases, stops = len(sampling.params.logit_bias), len(sampling.params.stop_token_ids)
    tokens, each = sum(map(len, prompts)), _BIAS_WEIGHT * biases + _STOP_WEIGHT * stops
    if sampling.n * (tokens + len(prompts) * each) > most:
        found = (
            f"{sampling.n * len(prompts)} sequences with prompts of {tokens // len(prompts)} tokens, "
            f"{biases} entries of logit_bias and {stops} ids that end them"
        )
        accepted = f"{most} in all, an entry counted as {_BIAS_WEIGHT} and an id that ends as {_STOP_WEIGHT}"
        raise invalid("n" if sampling.n > 1 else "prompt", found, accepted, code="too_much_for_one_request")
