"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atlas.engine.messages import TokenLogprobs
from atlas.serve.generation import Delta, Job, Reported, Whole
from atlas.serve.http import read_body
from atlas.serve.openai.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    PromptLogprobs,
)
from atlas.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from atlas.serve.openai.requests import ChatRequest, parse
from atlas.serve.openai.respond import make_jobs, respond
from atlas.serve.sampling import check
from atlas.serve.service import Service
from atlas.tokenizer import Tokenizer


class ChatFormat:
    """How chat answers are worded."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choice(self, job: Job, whole: Whole) -> ChatChoice:
        message, logprobs = AnswerMessage(whole.text), self._logprobs(job, whole.logprobs)
        return ChatChoice(job.index, message, whole.finish_reason, logprobs, self._prompt(job, whole.prompt))

    def chunk(self, job: Job, delta: Delta) -> ChatChunkChoice:
        logprobs = self._logprobs(job, delta.logprobs) if delta.logprobs else None
        content = ChatDelta(content=delta.text or None)
        return ChatChunkChoice(job.index, content, delta.finish_reason, logprobs, self._prompt(job, delta.prompt))

    def opening(self, job: Job) -> ChatChunkChoice:
        return ChatChunkChoice(job.index, ChatDelta(role="assistant", content=""))

    def _logprobs(self, job: Job, reported: list[Reported]) -> ChatLogprobs | None:
        return None if job.sampling.logprobs is None else chat_logprobs(reported, self._tokenizer)

    def _prompt(self, job: Job, reports: list[TokenLogprobs] | None) -> PromptLogprobs | msgspec.UnsetType:
        n_top = job.sampling.prompt_logprobs
        if reports is None or n_top is None:
            return msgspec.UNSET
        return prompt_logprobs(reports, n_top, self._tokenizer)


async def chat_completions(http: Request, service: Service) -> Response:
    """Render the conversation with the model's template and answer it."""
    serving = service.require()
    body = await read_body(http)
    request, ignored = parse(body, ChatRequest)
    headers = service.report_ignored(ignored)
    service.check_model(request.model)
    frontend, ready = serving.frontend, serving.ready
    checked = partial(
        check,
        request,
        frontend.defaults,
        ends=frontend.tokenizer.eos_token_ids,
        vocab_size=ready.vocab_size,
        seed=service.config.seed,
    )
    sampling = await frontend.run(checked, len(body))
    prompt = await frontend.chat_prompt(request.messages, ready.max_context, len(body))
    jobs, notes = make_jobs([prompt], sampling, ready.max_context)
    form = ChatFormat(frontend.tokenizer)
    return await respond(http, service, serving, request, jobs, form, headers | notes)
