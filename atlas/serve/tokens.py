"""POST /tokenize and /detokenize: between text and token ids, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atlas.serve.body import parse
from atlas.serve.chat_generation import chat_prompt, plan_of
from atlas.serve.errors import invalid
from atlas.serve.http import json_response
from atlas.serve.openai.requests import ChatRequest, Effort, about
from atlas.serve.service import Service, Serving
from atlas.text.messages import ChatMessage
from atlas.text.tools import MAX_TOOLS, Tool

_TOKEN = {"type": "integer", "minimum": 0}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: `prompt` or `messages`."""

    model: Annotated[str | None, about("The served model's name.")] = None
    prompt: Annotated[str | None, about("A text.")] = None
    messages: Annotated[list[ChatMessage] | None, about("A conversation, as the chat template renders it.")] = None
    tools: Annotated[list[Tool] | None, about("With messages: functions to call.", maxItems=MAX_TOOLS)] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("With messages: more variables for the chat template.")
    ] = None
    enable_thinking: Annotated[bool | None, about("With messages: the template's own switch of reasoning.")] = None
    reasoning_effort: Annotated[Effort | None, about("With messages: for the chat template.")] = None
    add_generation_prompt: Annotated[
        bool | None, about("With messages: what begins the assistant's answer comes last; unless said, it does.")
    ] = None
    continue_final_message: Annotated[
        bool | None, about("With messages: the prompt ends with the content of the last one, an assistant's.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        about("With prompt: what the tokenizer puts around a text, BOS for most, unless false. Templates write it."),
    ] = None
    return_token_strs: Annotated[bool | None, about("Spell each token as the vocabulary does.")] = None


TOKENIZE_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}


_OF_MESSAGES = (
    "tools",
    "chat_template_kwargs",
    "enable_thinking",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
)


class Tokenized(msgspec.Struct, frozen=True):
    """Answer of POST /tokenize. max_model_len: tokens that a prompt and its answer may have together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct):
    """Body of POST /detokenize."""

    tokens: Annotated[list[int], about("Token ids.", items=_TOKEN)]
    model: Annotated[str | None, about("The served model's name.")] = None


class Detokenized(msgspec.Struct, frozen=True):
    """Answer of POST /detokenize: the text, special tokens as they are spelled."""

    prompt: str


async def tokenize(http: Request, service: Service) -> Response:
    """What a completion of `prompt`, or a chat of `messages`, would feed the model. Longer texts than the context are
    taken too."""
    serving = service.require()
    read = partial(parse, kind=TokenizeRequest, neutral=TOKENIZE_REFUSED)
    (request, ignored), size = await serving.frontend.read(http, read)
    service.check_model(request.model)
    if request.messages is None:
        headers = service.report_ignored(ignored)
        ids = await _of_prompt(serving, request, size)
    else:
        ids, unread = await _of_messages(serving, request, size)
        headers = service.report_ignored([*ignored, *unread])

    def answer() -> Response:
        spell = serving.frontend.tokenizer.id_to_token
        spelled = [spell(index) or "" for index in ids] if request.return_token_strs else None
        return json_response(Tokenized(len(ids), serving.ready.max_context, ids, spelled), headers)

    return await serving.frontend.run(answer, size)


async def _of_prompt(serving: Serving, request: TokenizeRequest, size: int) -> list[int]:
    text = request.prompt
    if text is None:
        raise invalid("prompt", "missing", "prompt, or messages", code="missing_required_parameter")
    for name in _OF_MESSAGES:
        if getattr(request, name) is not None:
            raise invalid(name, "given with prompt", "with messages only: there is no template around a prompt")
    special = request.add_special_tokens is not False

    def encode() -> list[int]:
        return serving.frontend.text_prompt(text, None, "prompt", add_special_tokens=special)

    return await serving.frontend.run(encode, size)


async def _of_messages(serving: Serving, request: TokenizeRequest, size: int) -> tuple[list[int], Sequence[str]]:
    """The ids, and the paths of fields that the template does not read."""
    if request.prompt is not None:
        raise invalid("prompt", "given with messages", "one of the two")
    if request.add_special_tokens:
        raise invalid("add_special_tokens", "true with messages", "false: the template writes them")
    assert request.messages is not None
    frontend = serving.frontend
    chat = ChatRequest(
        messages=request.messages,
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
        enable_thinking=request.enable_thinking,
        reasoning_effort=request.reasoning_effort,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    plan = await frontend.run(lambda: plan_of(frontend, chat), size)
    prompt = await chat_prompt(frontend, chat, plan, size, None)
    return prompt.ids, plan.unread


async def detokenize(http: Request, service: Service) -> Response:
    """The text that ids stand for. Of ids that are parts of characters it has U+FFFD."""
    serving = service.require()
    (request, ignored), size = await serving.frontend.read(http, partial(parse, kind=DetokenizeRequest))
    headers = service.report_ignored(ignored)
    service.check_model(request.model)
    vocab_size = serving.ready.vocab_size

    def answer() -> Response:
        for position, token in enumerate(request.tokens):
            if not 0 <= token < vocab_size:
                raise invalid(f"tokens[{position}]", str(token)[:40], f"token ids from 0 to {vocab_size - 1}")
        text = serving.frontend.tokenizer.decode(request.tokens, skip_special_tokens=False)
        return json_response(Detokenized(text), headers)

    return await serving.frontend.run(answer, size)
