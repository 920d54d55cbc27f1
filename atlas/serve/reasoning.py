"""Whether a model is to reason, and for how long: one wish, which the APIs and their clients spell in many ways."""

from __future__ import annotations

from typing import Any

import msgspec

from atlas.errors import RequestError
from atlas.presets import Asked, Presets
from atlas.serve.errors import invalid, unsupported
from atlas.serve.openai.requests import ChatRequest
from atlas.tokenizer import Tokenizer


class Reasoning(msgspec.Struct, frozen=True):
    """What a request asks for. asked: of the chat template.  budget: tokens; None: no limit."""

    asked: Asked
    budget: int | None


def reasoning_of(request: ChatRequest, presets: Presets) -> Reasoning:
    """Raises ApiError 400: fields that contradict each other, or that this model cannot follow."""
    options, thinking = request.reasoning, request.thinking
    effort = _agreed(
        ("reasoning_effort", request.reasoning_effort),
        ("reasoning.effort", options.effort if options else None),
    )
    wanted = _agreed(
        ("enable_thinking", request.enable_thinking),
        ("thinking.type", None if thinking is None else thinking.type == "enabled"),
        ("reasoning.enabled", options.enabled if options else None),
    )
    budget = _agreed(
        ("thinking_budget", request.thinking_budget),
        ("thinking_token_budget", request.thinking_token_budget),
        ("max_thinking_tokens", request.max_thinking_tokens),
        ("thinking.budget_tokens", thinking.budget_tokens if thinking else None),
        ("reasoning.max_tokens", options.max_tokens if options else None),
    )
    if budget is not None:
        name, tokens = budget
        if tokens < 0:
            raise invalid(name, str(tokens)[:40], "an integer of at least 0")
        if presets.markers is None:
            raise unsupported(name, "a limit of reasoning for a model that has none")
    try:
        asked = presets.ask(thinking=wanted, effort=effort, chat_template_kwargs=request.chat_template_kwargs)
    except RequestError as error:
        raise invalid(error.where, error.found, error.accepted) from None
    # So large a budget is none for any context; a message to the engine could not carry every integer.
    return Reasoning(asked, None if budget is None else min(budget[1], 2**62))


def marker_ids(tokenizer: Tokenizer, marker: str) -> tuple[int, ...]:
    """The token ids that a marker is written with."""
    return tuple(tokenizer.encode(marker, add_special_tokens=False))


def _agreed(*given: tuple[str, Any]) -> tuple[str, Any] | None:
    """The first of these values that is there, with its path. Raises ApiError 400 if another contradicts it."""
    there = [(name, value) for name, value in given if value is not None]
    for name, value in there[1:]:
        if value != there[0][1]:
            first_name, first = there[0]
            raise invalid(name, f"{value}, but {first_name} is {first}", "one of the two, or fields that agree")
    return there[0] if there else None
