"""From a request's fields to `SamplingParams`: ranges, and defaults whose origin is known."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from atlas.engine.messages import SamplingParams
from atlas.engine.sampling import MAX_TEMPERATURE
from atlas.engine.sampling_defaults import SamplingDefaults
from atlas.serve.errors import ApiError, invalid
from atlas.serve.schemas import ChatRequest, CompletionRequest

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024


class SamplingRequest(msgspec.Struct, frozen=True):
    """A request's sampling fields, checked; only the prompts are still unknown."""

    params: SamplingParams
    stops: tuple[str, ...]
    max_tokens: int | None

    def fit(self, index: int, prompt_tokens: int, max_context: int) -> SamplingParams:
        """The parameters of choice `index`: max_tokens cut to the room that is left, and a seed of its own,
        so that equal prompts of one request are independent draws. Choice 0 has the request's seed."""
        room = max_context - prompt_tokens
        tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        seed = (self.params.seed + index + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(self.params, max_tokens=tokens, seed=seed)


def check(
    request: ChatRequest | CompletionRequest,
    defaults: SamplingDefaults,
    *,
    ends: Sequence[int],
    vocab_size: int,
    seed: int | None,
) -> SamplingRequest:
    """Raises ApiError 400 naming the field.

    ends: the model's own end ids, which stop a request unless it says `ignore_eos`.
    seed: the server's own, for requests without one.
    """
    temperature = _or(request.temperature, defaults.temperature)
    _within("temperature", temperature, 0, MAX_TEMPERATURE)
    top_p = _or(request.top_p, defaults.top_p)
    _within("top_p", top_p, 0, 1)
    top_k = _or(request.top_k, defaults.top_k)
    if top_k < -1:
        raise invalid("top_k", str(top_k), "a positive integer, or 0 or -1 for all tokens")
    stop_ids = request.stop_token_ids or []
    for position, token in enumerate(stop_ids):
        if not 0 <= token < vocab_size:
            raise invalid(f"stop_token_ids[{position}]", str(token), f"ids from 0 to {vocab_size - 1}")
    params = SamplingParams(
        max_tokens=1,
        temperature=temperature,
        top_p=top_p,
        top_k=min(max(top_k, 0), vocab_size),
        seed=_seed(request.seed, seed),
        stop_token_ids=tuple(sorted({*stop_ids, *(() if request.ignore_eos else ends)})),
    )
    return SamplingRequest(params, _stops(request.stop), _max_tokens(request))


def _or(value: float | None, default: float) -> Any:
    return default if value is None else value


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise invalid(name, str(value), f"a number from {low} to {high:g}")


def _seed(requested: int | None, server: int | None) -> int:
    if requested is None:
        return secrets.randbits(63) if server is None else server
    if not -(2**63) <= requested < 2**63:
        raise invalid("seed", str(requested)[:40], "a 64-bit integer")
    return requested


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"{len(stops)} strings", f"at most {MAX_STOPS}")
    for position, text in enumerate(stops):
        where = "stop" if isinstance(stop, str) else f"stop[{position}]"
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise invalid(where, f"{len(text)} characters", f"1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _max_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    name, value = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if value is not None and value != request.max_completion_tokens:
            raise _conflict(value, request.max_completion_tokens)
        name, value = "max_completion_tokens", request.max_completion_tokens
    if value is not None and value < 1:
        raise invalid(name, str(value)[:40], "an integer of at least 1, or null for all that fits")
    return value


def _conflict(max_tokens: int, max_completion_tokens: int) -> ApiError:
    found = f"{max_completion_tokens}, but max_tokens is {max_tokens}"
    return invalid("max_completion_tokens", found[:120], "one of the two, or equal values")
