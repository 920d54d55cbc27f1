"""What users give as prompts, checked and encoded before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from atlas.errors import RequestError
from atlas.text.chat_template import ChatTemplate
from atlas.text.messages import ChatMessage, turns
from atlas.text.switches import RESERVED
from atlas.tokenizer import Tokenizer
from atlas.tokenizer.tokenizer import GUARD


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One checked prompt. `where` names it in errors."""

    where: str
    text: str | None
    ids: list[int]


def split(
    given: Any, one: str = "prompt", several: str = "prompts", accepted: str = "a text, token ids, or a list of such"
) -> list[tuple[str, Any]]:
    """The single prompts, each with its name in errors: `one`, or `several` and its place. Raises RequestError."""
    if isinstance(given, str) or _is_ids(given):
        return [(one, given)]
    if not is_list(given):
        raise RequestError(several, f"a {type(given).__name__}", accepted)
    return [(f"{several}[{index}]", prompt) for index, prompt in enumerate(given)]


def is_list(value: Any) -> bool:
    """A list of something. Bytes are none: they would pass for token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def encode(where: str, prompt: Any, tokenize: Callable[[str], list[int]], vocab_size: int, max_context: int) -> Prompt:
    """Ids of a text (with what the model's tokenizer adds around one, usually BOS) or of ids as they are.

    Raises:
        RequestError: naming the prompt and, where one token is wrong, its place.
    """
    text = None
    if isinstance(prompt, str):
        text = prompt
        try:
            ids = tokenize(prompt)
        except RequestError as error:
            raise RequestError(where, error.found, error.accepted, error.fix) from None
    elif is_list(prompt):
        ids = [token_id(f"{where}[{position}]", token, vocab_size) for position, token in enumerate(prompt)]
    else:
        raise RequestError(where, f"a {type(prompt).__name__}", "a text or a list of token ids")
    check_length(where, len(ids), max_context)
    return Prompt(where, text, ids)


def check_length(where: str, tokens: int, max_context: int) -> None:
    """Raise RequestError unless a prompt leaves room for one more token."""
    if not 1 <= tokens < max_context:
        accepted = f"1 to {max_context - 1} (the context is {max_context} tokens, the answer included)"
        raise RequestError(where, f"{tokens} tokens", accepted)


def token_id(where: str, value: Any, vocab_size: int) -> int:
    """One token id, of Python or NumPy. Raises RequestError."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise RequestError(where, f"a {type(value).__name__}", "a token id")
    if not 0 <= value < vocab_size:
        raise RequestError(where, f"token id {value}", f"0..{vocab_size - 1}")
    return int(value)


def render(
    where: str,
    messages: Any,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    tools: Any,
    variables: Mapping[str, Any] | None,
    max_context: int,
) -> Prompt:
    """The prompt of one conversation: messages as the OpenAI API has them, through the model's own template.

    The user's words are guarded as on the server: a special token in them stays text.

    Raises:
        RequestError: naming the field of the message, or what the template does not read; or in its own words.
    """
    try:
        conversation = msgspec.convert(messages, list[ChatMessage])
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        raise RequestError(where + path.rstrip("`"), what, "messages as in the OpenAI API") from None
    if not conversation:
        raise RequestError(where, "empty", "at least one message")
    if not (tools is None or is_list(tools)):
        raise RequestError("tools", f"a {type(tools).__name__}", "a list of function definitions")
    if not (variables is None or isinstance(variables, Mapping)):
        raise RequestError("chat_template_kwargs", f"a {type(variables).__name__}", "a mapping of names to values")
    guard = tokenizer.guard
    tools, variables = _plain("tools", tools), _plain("chat_template_kwargs", dict(variables or {}))
    if tools and "tools" not in template.variables:
        found = "the chat template has no place for tools"
        raise RequestError("tools", found, fix="load the model with chat_template=FILE, one that has: docs/tools.md")
    names = template.variables - {*RESERVED}
    for name in variables:
        if name not in names:
            accepted = f"names that it reads: {', '.join(sorted(names)) or 'there are none'}"
            raise RequestError(f"chat_template_kwargs.{name[:60]}", "the chat template does not read it", accepted)
    try:
        text = template.render(
            turns(conversation, guard, template),
            tools=_guarded(tools, guard) if tools else None,
            variables=variables,
        )
        ids = tokenizer.encode_rendered(text)
    except RequestError as error:
        named = error.where.replace("messages", where, 1) if error.where.startswith("messages") else error.where
        raise RequestError(named, error.found, error.accepted, error.fix) from None
    check_length(where, len(ids), max_context)
    return Prompt(where, text.replace(GUARD, ""), ids)


def _is_ids(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return is_list(value) and len(value) > 0 and isinstance(value[0], int | np.integer)


def _plain(where: str, value: Any) -> Any:
    """Plain JSON data: a template must not get hold of anything that can be called."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:  # msgspec's own and a lone surrogate are ValueErrors
        raise RequestError(where, str(error), "plain JSON data") from None


def _guarded(value: Any, guard: Callable[[str], str], key: str = "") -> Any:
    if isinstance(value, str):
        return value if key == "type" else guard(value)  # templates compare types, which are the API's own names
    if isinstance(value, dict):
        return {name: _guarded(item, guard, name) for name, item in value.items()}
    return [_guarded(item, guard, key) for item in value] if isinstance(value, list) else value
