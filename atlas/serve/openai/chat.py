"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atlas.engine.messages import TokenLogprobs
from atlas.parsers import Answer, Call, CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from atlas.serve.chat_generation import prepare
from atlas.serve.generation import Delta, Job, Reported, Whole
from atlas.serve.openai.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    FunctionAnswer,
    FunctionDelta,
    PromptLogprobs,
    ToolCallAnswer,
    ToolCallDelta,
)
from atlas.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from atlas.serve.openai.requests import ChatRequest, parse
from atlas.serve.openai.respond import Asked, respond
from atlas.serve.service import Service, Serving
from atlas.tokenizer import Tokenizer


class ChatFormat:
    """How chat answers are worded."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choice(self, job: Job, whole: Whole) -> ChatChoice:
        message, logprobs = message_of(whole.answer), self._logprobs(job, whole.logprobs)
        return ChatChoice(job.index, message, whole.finish_reason, logprobs, self._prompt(job, whole.prompt))

    def chunks(self, job: Job, delta: Delta) -> list[ChatChunkChoice]:
        """One for each event, so that their order stays; what else there is goes with the first."""
        contents = [content for event in delta.events if (content := _delta_of(event)) is not None]
        logprobs = self._logprobs(job, delta.logprobs) if delta.logprobs else None
        prompt = self._prompt(job, delta.prompt)
        if not contents and delta.finish_reason is None and logprobs is None and prompt is msgspec.UNSET:
            return []  # a call has ended, which chunks do not tell
        first, *others = contents or [ChatDelta()]
        return [
            ChatChunkChoice(job.index, first, delta.finish_reason, logprobs, prompt),
            *(ChatChunkChoice(job.index, other) for other in others),
        ]

    def opening(self, job: Job) -> ChatChunkChoice:
        return ChatChunkChoice(job.index, ChatDelta(role="assistant", content=""))

    def _logprobs(self, job: Job, reported: list[Reported]) -> ChatLogprobs | None:
        return None if job.sampling.logprobs is None else chat_logprobs(reported, self._tokenizer)

    def _prompt(self, job: Job, reports: list[TokenLogprobs] | None) -> PromptLogprobs | msgspec.UnsetType:
        n_top = job.sampling.prompt_logprobs
        if reports is None or n_top is None:
            return msgspec.UNSET
        return prompt_logprobs(reports, n_top, self._tokenizer)


def message_of(answer: Answer) -> AnswerMessage:
    """The assistant's turn. Beside calls, content that is not there is null, as in OpenAI's API."""
    return AnswerMessage(
        content=answer.content or (None if answer.calls else ""),
        reasoning_content=answer.reasoning or msgspec.UNSET,
        tool_calls=[_call(call) for call in answer.calls] or msgspec.UNSET,
    )


def _call(call: Call) -> ToolCallAnswer:
    return ToolCallAnswer(call.id, FunctionAnswer(call.name, call.arguments))


def _delta_of(event: Event) -> ChatDelta | None:
    match event:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case CallBegin(index, identifier, name):
            call = ToolCallDelta(index, FunctionDelta("", name), identifier, "function")
            return ChatDelta(tool_calls=[call])
        case CallArguments(index, text):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))])
        case CallEnd():
            return None


async def chat_completions(http: Request, service: Service) -> Response:
    """Render the conversation with the model's template and answer it."""
    serving = service.require()
    asked = await _ask(http, service, serving)
    return await respond(http, service, serving, asked, ChatFormat(serving.frontend.tokenizer))


async def _ask(http: Request, service: Service, serving: Serving) -> Asked:
    (request, ignored), size = await serving.frontend.read(http, partial(parse, kind=ChatRequest))
    prepared = await prepare(service, serving, request, size, ignored=ignored)
    return Asked.of(request, prepared.jobs, prepared.headers)
