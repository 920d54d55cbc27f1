"""From prompts and a request's checked sampling fields to the sequences that the engine is given."""

from __future__ import annotations

from collections.abc import Sequence

from atlas.serve.generation import Job
from atlas.serve.sampling import SamplingRequest


def make_jobs(
    prompts: Sequence[list[int]],
    sampling: SamplingRequest,
    max_context: int,
    echoes: Sequence[str | None] | None = None,
) -> tuple[list[Job], dict[str, str]]:
    """The choices of each prompt, one after another, and a header that says so where max_tokens had to be cut.

    echoes: for each prompt the text to give back before the answer.
    """
    jobs = []
    for position, prompt in enumerate(prompts):
        for choice in range(sampling.n):
            index = position * sampling.n + choice
            params = sampling.fit(index, len(prompt), max_context)
            echo = echoes[position] if echoes is not None else None
            jobs.append(Job(index, prompt, params, sampling.stops, choice == 0, sampling.include_stop, echo))
    asked = sampling.max_tokens
    cut = [str(job.sampling.max_tokens) for job in jobs if asked is not None and job.sampling.max_tokens < asked]
    return jobs, {"x-atlas-max-tokens": ", ".join(cut[:64])} if cut else {}
