"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from atlas.serve.errors import invalid
from atlas.serve.frontend import check_length
from atlas.serve.generation import Delta, Whole
from atlas.serve.http import read_body
from atlas.serve.respond import Format, make_jobs, respond
from atlas.serve.sampling import check
from atlas.serve.schemas import CompletionChoice, CompletionRequest, parse
from atlas.serve.service import Service, Serving

MAX_PROMPTS = 2048


def _choice(index: int, whole: Whole) -> CompletionChoice:
    return CompletionChoice(index, whole.text, whole.finish_reason)


def _chunk(delta: Delta) -> CompletionChoice:
    return CompletionChoice(delta.index, delta.text, delta.finish_reason)


FORMAT = Format("cmpl-", "text_completion", "text_completion", _choice, _chunk)


async def completions(http: Request, service: Service) -> Response:
    """Continue one or several prompts, given as text or as token ids."""
    serving = service.require()
    body = await read_body(http)
    request, ignored = parse(body, CompletionRequest)
    headers = service.report_ignored(ignored)
    service.check_model(request.model)
    ready = serving.ready
    sampling = check(
        request,
        serving.frontend.defaults,
        ends=serving.frontend.tokenizer.eos_token_ids,
        vocab_size=ready.vocab_size,
        seed=service.config.seed,
    )
    parts = _split(request.prompt)

    def encode() -> list[list[int]]:
        return [_encode(serving, where, prompt) for where, prompt in parts]

    prompts = await serving.frontend.run(encode, len(body))
    jobs, notes = make_jobs(prompts, sampling, ready.max_context)
    return await respond(http, service, serving, request, jobs, FORMAT, headers | notes)


def _split(prompt: str | list[Any]) -> list[tuple[str, str | list[Any]]]:
    """The single prompts, each with its path in the request."""
    if isinstance(prompt, str) or (prompt and _is_id(prompt[0])):
        return [("prompt", prompt)]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise invalid("prompt", f"{len(prompt)} prompts", f"1 to {MAX_PROMPTS}")
    return [(f"prompt[{position}]", part) for position, part in enumerate(prompt)]


def _encode(serving: Serving, where: str, prompt: str | list[Any]) -> list[int]:
    max_context, vocab_size = serving.ready.max_context, serving.ready.vocab_size
    if isinstance(prompt, str):
        return serving.frontend.text_prompt(prompt, max_context, where)
    if not isinstance(prompt, list):
        raise invalid(where, f"a {type(prompt).__name__}", "a string or a list of token ids")
    for position, token in enumerate(prompt):
        if not _is_id(token):
            raise invalid(f"{where}[{position}]", f"a {type(token).__name__}", "a token id")
        if not 0 <= token < vocab_size:
            raise invalid(f"{where}[{position}]", str(token)[:40], f"token ids from 0 to {vocab_size - 1}")
    check_length(len(prompt), max_context, where)
    return prompt


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
