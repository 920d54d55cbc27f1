"""From a request's fields to `SamplingParams`: ranges, and defaults whose origin is known."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from atlas.engine.messages import SamplingParams
from atlas.engine.sampling import MAX_CHOICES, MAX_LOGPROBS, choice_seed, for_model, token_biases
from atlas.engine.sampling_defaults import SamplingDefaults
from atlas.errors import RequestError
from atlas.serve.errors import ApiError, invalid
from atlas.serve.openai.requests import MAX_STOP_LENGTH, MAX_STOPS, ChatRequest, CompletionRequest


class SamplingRequest(msgspec.Struct, frozen=True):
    """A request's sampling fields, checked; only the prompts are still unknown."""

    params: SamplingParams
    stops: tuple[str, ...]
    max_tokens: int | None
    n: int
    include_stop: bool

    def fit(self, index: int, prompt_tokens: int, max_context: int) -> SamplingParams:
        """The parameters of choice `index`, counted over all prompts: max_tokens cut to the room that is left,
        and a seed of its own, so that choices and equal prompts of one request are independent draws."""
        room = max_context - prompt_tokens
        tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        return msgspec.structs.replace(
            self.params,
            max_tokens=tokens,
            min_tokens=min(self.params.min_tokens, tokens),
            seed=choice_seed(self.params.seed, index),
        )


def check(
    request: ChatRequest | CompletionRequest,
    defaults: SamplingDefaults,
    *,
    ends: Sequence[int],
    vocab_size: int,
    seed: int | None,
    min_priority: int,
) -> SamplingRequest:
    """Raises ApiError 400 naming the field.

    ends: the model's own end ids, which stop a request unless it says `ignore_eos`.
    seed: the server's own, for requests without one.
    min_priority: the least that a request may say.
    """
    top_k = _or(request.top_k, defaults.top_k)
    if top_k < -1:
        raise invalid("top_k", str(top_k), "a positive integer, or 0 or -1 for all tokens")
    n = _or(request.n, 1)
    if not 1 <= n <= MAX_CHOICES:
        raise invalid("n", str(n)[:40], f"an integer from 1 to {MAX_CHOICES}")
    priority = _or(request.priority, max(0, min_priority))
    if priority < min_priority:
        accepted = f"an integer of at least {min_priority}, the least that this server takes (--min-priority)"
        raise invalid("priority", str(priority)[:40], accepted, code="priority_not_allowed")
    for name in ("logit_bias", "stop_token_ids"):
        if (count := len(getattr(request, name) or ())) > vocab_size:
            raise invalid(name, f"{count} entries", f"at most {vocab_size}, the vocabulary")
    logprobs, prompt_logprobs = _logprobs(request)
    max_tokens = _max_tokens(request, scoring=prompt_logprobs is not None or _echoes(request))
    try:
        params = SamplingParams(
            max_tokens=2**62 if max_tokens is None else max_tokens,
            min_tokens=_or(request.min_tokens, 0),
            temperature=_or(request.temperature, defaults.temperature),
            top_p=_or(request.top_p, defaults.top_p),
            top_k=max(top_k, 0),
            min_p=_or(request.min_p, defaults.min_p),
            repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_or(request.presence_penalty, defaults.presence_penalty),
            frequency_penalty=_or(request.frequency_penalty, defaults.frequency_penalty),
            logit_bias=token_biases(request.logit_bias or {}),
            seed=_or(request.seed, secrets.randbits(63) if seed is None else seed),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            priority=priority,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        params = for_model(params, () if request.ignore_eos else ends, vocab_size)
    except RequestError as error:
        name = "top_logprobs" if error.where == "logprobs" and isinstance(request, ChatRequest) else error.where
        raise invalid(name, error.found[:80], error.accepted) from None
    return SamplingRequest(params, _stops(request.stop), max_tokens, n, bool(request.include_stop_str_in_output))


def _or(value: float | None, default: float) -> Any:
    return default if value is None else value


def _echoes(request: ChatRequest | CompletionRequest) -> bool:
    return isinstance(request, CompletionRequest) and bool(request.echo)


def _logprobs(request: ChatRequest | CompletionRequest) -> tuple[int | None, int | None]:
    """For how many likeliest tokens the answer's and the prompt's log-probabilities are wanted."""
    prompt = request.prompt_logprobs
    if isinstance(request, ChatRequest):
        if request.logprobs:
            return _or(request.top_logprobs, 0), prompt
        if request.top_logprobs:
            raise invalid("top_logprobs", str(request.top_logprobs)[:40], "none, unless logprobs is true")
        return None, prompt
    if request.logprobs is True:
        raise invalid("logprobs", "true", f"an integer from 0 to {MAX_LOGPROBS}, or null")
    answer = None if request.logprobs is False else request.logprobs
    if request.echo and answer is not None:
        prompt = answer if prompt is None else max(answer, prompt)
    return answer, prompt


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"{len(stops)} strings", f"at most {MAX_STOPS}")
    for position, text in enumerate(stops):
        where = "stop" if isinstance(stop, str) else f"stop[{position}]"
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise invalid(where, f"{len(text)} characters", f"1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _max_tokens(request: ChatRequest | CompletionRequest, *, scoring: bool) -> int | None:
    """`scoring`: something about the prompt is wanted, so that no token at all is a sensible answer."""
    name, value = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if value is not None and value != request.max_completion_tokens:
            raise _conflict(value, request.max_completion_tokens)
        name, value = "max_completion_tokens", request.max_completion_tokens
    least = 0 if scoring else 1
    if value is not None and value < least:
        raise invalid(name, str(value)[:40], f"an integer of at least {least}, or null for all that fits")
    return value


def _conflict(max_tokens: int, max_completion_tokens: int) -> ApiError:
    found = f"{max_completion_tokens}, but max_tokens is {max_tokens}"
    return invalid(
        "max_completion_tokens", found[:120], "one of the two, or equal values", code="conflicting_parameters"
    )
