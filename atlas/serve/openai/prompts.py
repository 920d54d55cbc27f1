"""Prompts and inputs as OpenAI's API has them: a text, several, token ids, or several lists of them."""

from __future__ import annotations

from typing import Any

from atlas.serve.errors import invalid
from atlas.serve.frontend import check_length
from atlas.serve.reference.wrong_fields import shown
from atlas.serve.service import Serving

MAX_PROMPTS = 2048


def split(field: str, value: str | list[Any]) -> list[tuple[str, str | list[Any]]]:
    """The single prompts of a field, each with its path in the request. Raises ApiError 400."""
    if isinstance(value, str) or (value and _is_id(value[0])):
        return [(field, value)]
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise invalid(field, f"{len(value)} entries", f"1 to {MAX_PROMPTS}")
    return [(f"{field}[{position}]", part) for position, part in enumerate(value)]


def encode_prompt(serving: Serving, where: str, prompt: str | list[Any]) -> list[int]:
    """The ids of one prompt. Blocks: see `Frontend.run`. Raises ApiError 400: not one, or too long."""
    max_context, vocab_size = serving.ready.max_context, serving.ready.vocab_size
    if isinstance(prompt, str):
        return serving.frontend.text_prompt(prompt, max_context, where)
    if not isinstance(prompt, list):
        raise invalid(where, shown(prompt), "a string or a list of token ids")
    for position, token in enumerate(prompt):
        if not _is_id(token):
            raise invalid(f"{where}[{position}]", shown(token), "a token id")
        if not 0 <= token < vocab_size:
            raise invalid(f"{where}[{position}]", str(token)[:40], f"token ids from 0 to {vocab_size - 1}")
    check_length(len(prompt), max_context, where)
    return prompt


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
