"""Whether a model is to reason, for how long, and how its chat template is told."""

from __future__ import annotations

from typing import Any

import msgspec

from atlas.serve.errors import invalid, unsupported
from atlas.serve.openai.requests import ChatRequest
from atlas.serve.presets import Presets
from atlas.tokenizer import Tokenizer

EFFORT = "reasoning_effort"


class Reasoning(msgspec.Struct, frozen=True):
    """What a request asks for. variables: for the chat template.  budget: tokens, None: no limit."""

    variables: dict[str, Any]
    budget: int | None


def reasoning_of(request: ChatRequest, presets: Presets) -> Reasoning:
    """Raises ApiError 400: fields that contradict each other, or that this model cannot follow."""
    markers, switch = presets.markers, presets.switches.thinking
    options, thinking = request.reasoning, request.thinking
    effort_name, effort = _agreed(
        (EFFORT, request.reasoning_effort),
        ("reasoning.effort", options.effort if options else None),
    )
    wanted_name, wanted = _agreed(
        ("enable_thinking", request.enable_thinking),
        ("thinking.type", None if thinking is None else thinking.type == "enabled"),
        ("reasoning.enabled", options.enabled if options else None),
        (effort_name, None if effort is None else effort != "none"),
    )
    budget_name, budget = _agreed(
        ("thinking_budget", request.thinking_budget),
        ("thinking_token_budget", request.thinking_token_budget),
        ("max_thinking_tokens", request.max_thinking_tokens),
        ("thinking.budget_tokens", thinking.budget_tokens if thinking else None),
        ("reasoning.max_tokens", options.max_tokens if options else None),
    )
    if budget is not None:
        if budget < 0:
            raise invalid(budget_name, str(budget)[:40], "an integer of at least 0")
        if markers is None:
            raise unsupported(budget_name, "a limit of reasoning for a model that has none")
    if wanted is None:
        wanted = presets.enable_thinking
    variables: dict[str, Any] = {}
    levels = EFFORT in presets.switches.names
    if wanted is not None and switch is not None:
        variables[switch] = wanted
    if levels and (effort is not None or (wanted is False and switch is None)):
        variables[EFFORT] = effort or "none"
    if wanted_name and switch is None and not levels and wanted is not (markers is not None):
        # Off for a model that has no reasoning, and on for one that always has, ask for nothing.
        lack = "reasoning" if wanted else "a switch for its reasoning"
        raise unsupported(wanted_name, f"{_shown(request, wanted_name)}, for a model without {lack},")
    return Reasoning(variables, budget)


def marker_ids(tokenizer: Tokenizer, marker: str) -> tuple[int, ...]:
    """The token ids that a marker is written with."""
    return tuple(tokenizer.encode(marker, add_special_tokens=False))


def _shown(request: ChatRequest, path: str) -> str:
    value: Any = request
    for name in path.split("."):
        value = getattr(value, name)
    return msgspec.json.encode(value).decode()


def _agreed(*given: tuple[str, Any]) -> tuple[str, Any]:
    """The first of these values that is there, and its path. Raises ApiError 400 if another contradicts it."""
    there = [(name, value) for name, value in given if value is not None]
    for name, value in there[1:]:
        if value != there[0][1]:
            first_name, first = there[0]
            raise invalid(name, f"{value}, but {first_name} is {first}", "one of the two, or fields that agree")
    return there[0] if there else ("", None)
