"""What the API process itself needs of a model: tokenizer, chat template, sampling defaults."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from atlas.config import Origin, ServeConfig
from atlas.engine.sampling_defaults import SamplingDefaults
from atlas.errors import RequestError
from atlas.parsers import shown_words
from atlas.presets import Presets
from atlas.serve.errors import ApiError, invalid
from atlas.serve.grammar_worker import Vocabulary
from atlas.serve.grammars import GrammarChecker
from atlas.serve.http import read_body
from atlas.serve.offload import Offload
from atlas.text.chat_template import ChatTemplate, load_template
from atlas.text.messages import ChatMessage, guard_all, turns
from atlas.text.tools import Tool, definitions
from atlas.tokenizer import Tokenizer
from atlas.weights import open_checkpoint

logger = logging.getLogger("atlas.serve")

LARGE_TEXT = 8 << 10
"""Bytes of a request from which its work moves off the event loop: there, it is about a millisecond."""

MAX_TEXT = 4 << 20
"""Bytes of a text that is tokenised for nothing but its ids: a few seconds' work, and 150 bytes of memory for each of
its tokens, of which a byte may be one."""

SLOW_SECONDS = 0.05

_CHARACTERS_PER_TOKEN = 8
"""Above most real texts' average; only decides when a first look at the pieces is worth it."""

_HERE = "\ufdd1"
"""Marks the end of a content that the answer goes on with; like the tokenizer's guard, no text means anything by it."""

T = TypeVar("T")


class ChatPrompt(msgspec.Struct, frozen=True):
    """A rendered conversation: its ids, and its text."""

    ids: list[int]
    text: str


class Frontend:
    """One model as the API process sees it. Made by `load`; then used from the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        presets: Presets,
        template_fault: str = "",
        weights_digest: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.presets = presets
        self.weights_digest = weights_digest
        self.grammars = GrammarChecker(Vocabulary(tokenizer.vocab_size, dict(tokenizer.special_tokens)))
        self._template_fault = template_fault
        self._offload = Offload()
        self._slow = False

    @classmethod
    def load(cls, path: Path, config: ServeConfig, origins: Sequence[Origin] = ()) -> Frontend:
        """Read a checkpoint's small files. A broken chat template of the model disables chat only, and says so.

        origins: where each value of `config` came from.

        Raises:
            CheckpointError: the tokenizer cannot be used.
            ConfigError: a setting does not fit the model.
        """
        with open_checkpoint(path) as checkpoint:
            tokenizer = Tokenizer.from_checkpoint(checkpoint)
            own = tokenizer.chat_template
            template, fault = load_template(own, tokenizer.special_tokens_map, config.chat_template)
            digest = checkpoint.digest()
            presets = Presets.of(
                checkpoint.config, checkpoint.generation_config, template, config, origins, own_template=own
            )
        tokenizer.warm_up()
        for words in (shown_words(None, presets.markers), shown_words(presets.parser, presets.markers)):
            tokenizer.stream(words)  # so that what it needs is made here, and not when a request waits
        if template is not None:
            # Found here by rendering, which stalls no stream.
            logger.debug("calls of the history are rendered in this way: %s", template.call_style)
            logger.debug("shown of the history: calls %s, names %s", template.shows_calls, template.shows_names)
        if template is None:
            logger.warning("%s: /v1/chat/completions will answer 400, /v1/completions works", fault)
        elif config.tool_parser == "auto" and presets.switches.takes_tools and presets.tool_format is None:
            told = next(origin.origin for origin in presets.origins if origin.name == "tool_parser")
            logger.warning("requests with tools will answer 400, for no tool parser is known (%s)", told)
        return cls(tokenizer, template, presets, fault, digest)

    @property
    def defaults(self) -> SamplingDefaults:
        """Sampling of a request that says nothing of it, nor of thinking."""
        return self.presets.sampling()

    def require_template(self) -> ChatTemplate:
        """The model's chat template. Raises ApiError 400 if it has none that can be used."""
        if self.template is None:
            raise invalid("messages", self._template_fault, "a prompt sent to /v1/completions", code="no_chat_template")
        return self.template

    async def read(self, http: Request, parse: Callable[[bytes], T]) -> tuple[T, int]:
        """What `parse` makes of a request's body, and the size of the body, which is not kept.

        Raises ApiError 408 and 413, as `read_body`, and what `parse` raises.
        """
        parts = await read_body(http)
        size = sum(map(len, parts))

        def work() -> T:
            body = b"".join(parts)
            parts.clear()
            return parse(body)

        return await self.run(work, size), size

    async def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        max_context: int | None,
        body_size: int,
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> ChatPrompt:
        """A conversation through the model's template. Raises ApiError 400: refused by it, or too long.

        max_context: tokens that prompt and answer may have together; None: it is not going to be answered.
        continue_final: the prompt ends where the content of the last message does, so that the answer goes on with it.
        """
        template = self.require_template()
        if not messages:
            raise invalid("messages", "empty", "at least one message", code="empty_array")
        guard = self.tokenizer.guard

        def work() -> ChatPrompt:
            try:
                conversation = turns(messages, guard, template)
                declared = definitions(tools, lambda value: guard_all(value, guard)) or None
            except RequestError as error:
                raise invalid(error.where, error.found, error.accepted) from None
            except RecursionError:
                raise invalid("messages", "arguments or schemas nested too deeply") from None
            if continue_final:
                conversation[-1]["content"] += _HERE
            try:
                text = template.render(
                    conversation,
                    tools=declared,
                    variables=variables,
                    add_generation_prompt=add_generation_prompt and not continue_final,
                )
            except RequestError as error:
                raise ApiError(400, "chat_template_error", str(error), "messages") from None
            if continue_final:
                text, found, _ = text.rpartition(_HERE)
                if not found:
                    found = "the chat template does not show the last message's content"
                    raise invalid("continue_final_message", found)
            ids = _encode(self.tokenizer.encode_rendered, text, max_context, "messages")
            return ChatPrompt(ids, text)

        return await self.run(work, body_size)

    def text_prompt(
        self, text: str, max_context: int | None, where: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The ids of a plain prompt, with what the tokenizer adds around a text (BOS). Blocks: see `run`."""

        def encode(part: str) -> list[int]:
            return self.tokenizer.encode(part, add_special_tokens=add_special_tokens)

        return _encode(encode, text, max_context, where)

    async def run(self, work: Callable[[], T], body_size: int) -> T:
        """Do what a request of this size needs: here, or in a thread where it would stall the event loop."""
        if body_size >= LARGE_TEXT or self._slow:
            return await self._offload.run(work)
        started = time.thread_time()  # of this thread: what others take in theirs says nothing about the work
        try:
            return work()
        finally:
            # A template can be slow on a small input; it stalls every stream once, not each time.
            self._slow = time.thread_time() - started > SLOW_SECONDS


def check_length(tokens: int, max_context: int, where: str, *, at_least: bool = False) -> None:
    """Raise ApiError 400 with both numbers unless a prompt leaves room for one more token."""
    if tokens == 0:
        raise invalid(where, "no tokens", "at least one token", code="empty_prompt")
    if tokens >= max_context:
        found = f"{'at least ' if at_least else ''}{tokens} tokens"
        accepted = f"at most {max_context - 1} (the context is {max_context} tokens, the answer included)"
        raise invalid(where, found, accepted, code="context_length_exceeded")


def _encode(encode: Callable[[str], list[int]], text: str, max_context: int | None, where: str) -> list[int]:
    """Tokenise, but spend neither seconds nor gigabytes on a text that is far too long."""
    try:
        if max_context is None:
            if (size := len(text.encode(errors="surrogatepass"))) > MAX_TEXT:
                raise invalid(where, f"{size} bytes", f"at most {MAX_TEXT}", code="string_above_max_length")
            return encode(text)
        if len(text) > _CHARACTERS_PER_TOKEN * max_context:
            piece = max(max_context, 4096)
            tokens, most = 0, max_context + max_context // 10
            for at in range(0, len(text), piece):
                tokens += len(encode(text[at : at + piece]))
                most += 16  # a cut can change the tokens around it: far fewer
                if tokens > most:
                    check_length(tokens, max_context, where, at_least=True)
        ids = encode(text)
    except RequestError as error:
        raise invalid(where, error.found, error.accepted) from None
    check_length(len(ids), max_context, where)
    return ids
