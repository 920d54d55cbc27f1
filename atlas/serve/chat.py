"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from atlas.serve.generation import Delta, Whole
from atlas.serve.http import read_body
from atlas.serve.respond import Format, make_jobs, respond
from atlas.serve.sampling import check
from atlas.serve.schemas import AnswerMessage, ChatChoice, ChatChunkChoice, ChatDelta, ChatRequest, parse
from atlas.serve.service import Service


def _choice(index: int, whole: Whole) -> ChatChoice:
    return ChatChoice(index, AnswerMessage(whole.text), whole.finish_reason)


def _chunk(delta: Delta) -> ChatChunkChoice:
    return ChatChunkChoice(delta.index, ChatDelta(content=delta.text or None), delta.finish_reason)


def _opening(index: int) -> ChatChunkChoice:
    return ChatChunkChoice(index, ChatDelta(role="assistant", content=""))


FORMAT = Format("chatcmpl-", "chat.completion", "chat.completion.chunk", _choice, _chunk, _opening)


async def chat_completions(http: Request, service: Service) -> Response:
    """Render the conversation with the model's template and answer it."""
    serving = service.require()
    body = await read_body(http)
    request, ignored = parse(body, ChatRequest)
    headers = service.report_ignored(ignored)
    service.check_model(request.model)
    frontend, ready = serving.frontend, serving.ready
    sampling = check(
        request,
        frontend.defaults,
        ends=frontend.tokenizer.eos_token_ids,
        vocab_size=ready.vocab_size,
        seed=service.config.seed,
    )
    prompt = await frontend.chat_prompt(request.messages, ready.max_context, len(body))
    jobs, notes = make_jobs([prompt], sampling, ready.max_context)
    return await respond(http, service, serving, request, jobs, FORMAT, headers | notes)
