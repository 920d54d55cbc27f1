"""What the API process itself needs of a model: tokenizer, chat template, sampling defaults."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atlas.errors import CheckpointError, RequestError
from atlas.serve.chat_template import ChatTemplate
from atlas.serve.errors import ApiError, invalid
from atlas.serve.offload import Offload
from atlas.serve.sampling import SamplingDefaults
from atlas.serve.schemas import ChatMessage, ToolCall
from atlas.tokenizer import Tokenizer
from atlas.weights import open_checkpoint

logger = logging.getLogger("atlas.serve")

LARGE_TEXT = 8 << 10
"""Bytes of a request from which its work moves off the event loop: there, it is about a millisecond."""

SLOW_SECONDS = 0.05

_CHARACTERS_PER_TOKEN = 16
"""Far above any real text's average; only decides when a first look at the beginning is worth it."""

T = TypeVar("T")


class Frontend:
    """One model as the API process sees it. Made by `load`; then used from the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
        template_fault: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults
        self._template_fault = template_fault
        self._offload = Offload()
        self._slow = False

    @classmethod
    def load(cls, path: Path) -> Frontend:
        """Read a checkpoint's small files. A broken chat template disables chat only, and says so."""
        with open_checkpoint(path) as checkpoint:
            tokenizer = Tokenizer.from_checkpoint(checkpoint)
            defaults = SamplingDefaults.of_model(checkpoint.generation_config)
        template, fault = None, "this model has no chat template"
        if tokenizer.chat_template is not None:
            try:
                template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)
            except CheckpointError as error:
                fault = f"this model's chat template cannot be used ({error})"
        if template is None:
            logger.warning("%s: /v1/chat/completions will answer 400, /v1/completions works", fault)
        return cls(tokenizer, template, defaults, fault)

    async def chat_prompt(self, messages: Sequence[ChatMessage], max_context: int, body_size: int) -> list[int]:
        """The ids of a conversation. Raises ApiError 400: no template, refused by it, or too long."""
        template = self.template
        if template is None:
            raise invalid("messages", self._template_fault, "a prompt sent to /v1/completions", code="no_chat_template")
        if not messages:
            raise invalid("messages", "empty", "at least one message", code="empty_array")

        def work() -> list[int]:
            turns = self._turns(messages, template)
            try:
                text = template.render(turns)
            except RequestError as error:
                raise ApiError(400, "chat_template_error", str(error), "messages") from None
            return _encode(self.tokenizer.encode_rendered, text, max_context, "messages")

        return await self.run(work, body_size)

    def text_prompt(self, text: str, max_context: int, where: str) -> list[int]:
        """The ids of a plain prompt, with what the tokenizer adds around a text (BOS). Blocks: see `run`."""

        def encode(part: str) -> list[int]:
            return self.tokenizer.encode(part, add_special_tokens=True)

        return _encode(encode, text, max_context, where)

    async def run(self, work: Callable[[], T], body_size: int) -> T:
        """Do what a request of this size needs: here, or in a thread where it would stall the event loop."""
        if body_size >= LARGE_TEXT or self._slow:
            return await self._offload.run(work)
        started = time.perf_counter()
        try:
            return work()
        finally:
            # A template can be slow on a small input; it stalls every stream once, not each time.
            self._slow = time.perf_counter() - started > SLOW_SECONDS

    def _turns(self, messages: Sequence[ChatMessage], template: ChatTemplate) -> list[dict[str, Any]]:
        """Messages as templates expect them, the client's own words guarded.

        Guarding is what keeps a special token typed by a user from becoming a control token. Roles and the
        API's own names are not the client's words, and templates compare them, so they stay as they are.
        """
        guard = self.tokenizer.guard
        turns = []
        for position, message in enumerate(messages):
            where = f"messages[{position}]"
            if message.content is None and message.role not in ("assistant", "tool", "function"):
                raise invalid(f"{where}.content", "null or absent", "a string or a list of text parts")
            role = message.role
            if role == "developer" and not template.knows_developer:
                role = "system"  # the same thing under its older name
            # Not None: a template that prints the content would print the word "None".
            content = message.content or ""
            if isinstance(content, list):
                content = "\n".join(part.text for part in content)
            turn: dict[str, Any] = {"role": role, "content": guard(content)}
            for name in ("name", "tool_call_id", "reasoning_content"):
                if (value := getattr(message, name)) is not None:
                    turn[name] = guard(value)
            if message.tool_calls:
                turn["tool_calls"] = [_tool_call(call, guard) for call in message.tool_calls]
            turns.append(turn)
        return turns


def check_length(tokens: int, max_context: int, where: str, *, at_least: bool = False) -> None:
    """Raise ApiError 400 with both numbers unless a prompt leaves room for one more token."""
    if tokens == 0:
        raise invalid(where, "no tokens", "at least one token", code="empty_prompt")
    if tokens >= max_context:
        found = f"{'at least ' if at_least else ''}{tokens} tokens"
        accepted = f"at most {max_context - 1} (the context is {max_context} tokens, the answer included)"
        raise invalid(where, found, accepted, code="context_length_exceeded")


def _encode(encode: Callable[[str], list[int]], text: str, max_context: int, where: str) -> list[int]:
    """Tokenise, but do not spend seconds on a text whose beginning alone is too long."""
    try:
        beginning = _CHARACTERS_PER_TOKEN * max_context
        if len(text) > 2 * beginning:
            tokens = len(encode(text[:beginning]))
            # The cut can change the last few tokens; a tenth is far more than it can.
            if tokens > max_context + max_context // 10 + 16:
                check_length(tokens, max_context, where, at_least=True)
        ids = encode(text)
    except RequestError as error:
        raise invalid(where, error.found, error.accepted) from None
    check_length(len(ids), max_context, where)
    return ids


def _tool_call(call: ToolCall, guard: Callable[[str], str]) -> dict[str, Any]:
    function = {"name": guard(call.function.name), "arguments": _arguments(call.function.arguments, guard)}
    result: dict[str, Any] = {"type": call.type, "function": function}
    if call.id is not None:
        result["id"] = guard(call.id)
    return result


def _arguments(arguments: str | dict[str, Any], guard: Callable[[str], str]) -> Any:
    """Templates index and print arguments as an object; the API carries them as a JSON string.

    What is no JSON object stays the text that it is: it was written by a model, and nothing better is known.
    """
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.MsgspecError, RecursionError, ValueError):
            value = None
    return _guard_all(value if isinstance(value, dict) else arguments, guard)


def _guard_all(value: Any, guard: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, dict):
        return {guard(key): _guard_all(item, guard) for key, item in value.items()}
    if isinstance(value, list):
        return [_guard_all(item, guard) for item in value]
    return value
