"""Every endpoint of the server. A new one is a handler somewhere and a line here."""

from __future__ import annotations

import asyncio
import functools
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from atlas.serve.access.auth import CLIENT, STRANGER
from atlas.serve.anthropic.answers import Message, MessageEvent, TokenCount
from atlas.serve.anthropic.messages import count_tokens, messages
from atlas.serve.anthropic.requests import MESSAGES_REFUSED, Conversation, MessagesRequest
from atlas.serve.bind import url_of
from atlas.serve.http import json_response
from atlas.serve.openai.answers import Answer, ChatChoice, ChatChunkChoice, CompletionChoice, ModelCard, ModelList
from atlas.serve.openai.chat import chat_completions
from atlas.serve.openai.completions import completions
from atlas.serve.openai.embeddings import EMBEDDINGS_REFUSED, EmbeddingList, EmbeddingRequest, embeddings
from atlas.serve.openai.requests import ChatRequest, CompletionRequest, about, refused
from atlas.serve.openai.response_events import StreamEvent
from atlas.serve.openai.responses import (
    MAX_PAGE,
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from atlas.serve.openai.responses_items import ItemReference, MessageItem
from atlas.serve.openai.responses_objects import InputItemList, InputTokenCount, ResponseDeleted, ResponseObject
from atlas.serve.openai.responses_request import REFUSED, Includable, ResponseRequest
from atlas.serve.reference import docs_page, openapi
from atlas.serve.reference.endpoint import Endpoint, Text
from atlas.serve.server_info import ServerInfo, Version, server_info, version
from atlas.serve.service import Health, Service
from atlas.serve.telemetry.scrape import metrics
from atlas.serve.tokens import (
    TOKENIZE_REFUSED,
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    detokenize,
    tokenize,
)


async def _health(http: Request, service: Service) -> Response:
    health = service.health()
    if http.scope.get(CLIENT) == STRANGER:  # what the engine says may name files and sizes
        health = Health(health.status)
    headers = {} if health.status == "ok" else {"Retry-After": "1"}
    return json_response(health, headers, 200 if health.status == "ok" else 503)


async def _live(_: Request, __: Service) -> Response:
    # Whoever restarts a process that loads for long only makes it begin again.
    return json_response(Health("ok"))


async def _models(_: Request, service: Service) -> Response:
    cards = [_card(service, name) for name in service.config.model_names]
    return json_response(ModelList(cards, cards[0].id, cards[-1].id))


async def _model(request: Request, service: Service) -> Response:
    name: str = request.path_params["model"]
    service.check_model(name)
    return json_response(_card(service, name if name in service.config.model_names else service.config.model_name))


def _card(service: Service, name: str) -> ModelCard:
    most = service.require().ready.max_context
    return ModelCard(
        id=name,
        created=service.created,
        max_model_len=most,
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat(),
        max_input_tokens=most - 1,
        max_tokens=most - 1,
    )


@functools.cache
def _document(keyed: bool, strict: bool, model: str) -> dict[str, Any]:
    return openapi.document(ENDPOINTS, keyed=keyed, strict=strict, model=model)


@functools.cache
def _page(keyed: bool, strict: bool, model: str, url: str) -> str:
    return docs_page.page(_document(keyed, strict, model), url)


def _kind(service: Service) -> tuple[bool, bool, str]:
    config = service.config
    return bool(config.api_key or config.api_key_file), config.strict_fields, config.model_name


async def _openapi(_: Request, service: Service) -> Response:
    # A fifth of a second when it is made, for which every stream would wait.
    return json_response(await asyncio.to_thread(_document, *_kind(service)))


async def _docs(_: Request, service: Service) -> Response:
    config = service.config
    url = url_of(config.host, config.port, secure=config.ssl_certfile is not None)
    return HTMLResponse(await asyncio.to_thread(_page, *_kind(service), url), headers=docs_page.HEADERS)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        summary="Answer a conversation.",
        tag="OpenAI",
        body=ChatRequest,
        refused=refused(ChatRequest),
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64},
        answers={200: Answer[ChatChoice]},
        stream=Answer[ChatChunkChoice],
    ),
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=completions,
        summary="Continue one or several prompts.",
        tag="OpenAI",
        body=CompletionRequest,
        refused=refused(CompletionRequest),
        example={"prompt": "Once upon a time", "max_tokens": 16},
        answers={200: Answer[CompletionChoice]},
        stream=Answer[CompletionChoice],
    ),
    Endpoint(
        method="POST",
        path="/v1/responses",
        handler=create_response,
        summary="Answer an input, or go on with a stored conversation.",
        tag="OpenAI",
        body=ResponseRequest,
        refused=REFUSED,
        untagged=(MessageItem, ItemReference),
        example={"input": "Hello", "max_output_tokens": 64},
        answers={200: ResponseObject},
        stream=StreamEvent,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=count_input_tokens,
        summary="Count the tokens of the prompt that such a request would have.",
        tag="OpenAI",
        body=ResponseRequest,
        refused=REFUSED,
        untagged=(MessageItem, ItemReference),
        example={"input": "Hello"},
        answers={200: InputTokenCount},
    ),
    Endpoint(
        method="GET",
        path="/v1/responses/{response_id}",
        handler=retrieve_response,
        summary="A stored response.",
        tag="OpenAI",
        answers={200: ResponseObject},
        stream=StreamEvent,
        query={
            "include": (list[Includable] | None, "What must be among what is told."),
            "stream": (bool | None, "The events of a response that was created with background and stream."),
            "starting_after": (int | None, "Only the events after the one of this sequence number."),
            "include_obfuscation": (Literal[False] | None, "Events are sent again as they were."),
        },
        errors=(404, 429),
    ),
    Endpoint(
        method="DELETE",
        path="/v1/responses/{response_id}",
        handler=delete_response,
        summary="Forget a response.",
        tag="OpenAI",
        answers={200: ResponseDeleted},
        errors=(404,),
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        handler=cancel_response,
        summary="Stop a response that is made in the background.",
        tag="OpenAI",
        answers={200: ResponseObject},
        errors=(404, 415, 429),
    ),
    Endpoint(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        handler=list_input_items,
        summary="What a response answers.",
        tag="OpenAI",
        answers={200: InputItemList},
        query={
            "include": (list[Includable] | None, "What must be among what is told."),
            "limit": (
                Annotated[int | None, about("At most so many.", minimum=1, maximum=MAX_PAGE)],
                "Items of a page.",
            ),
            "order": (Literal["asc", "desc"] | None, "By time; unset: desc, the latest first."),
            "after": (str | None, "Only the items after the one of this id."),
        },
        errors=(404, 429),
    ),
    Endpoint(
        method="POST",
        path="/v1/messages",
        handler=messages,
        summary="Answer a conversation.",
        tag="Anthropic",
        body=MessagesRequest,
        refused=MESSAGES_REFUSED,
        example={"max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]},
        answers={200: Message},
        stream=MessageEvent,
    ),
    Endpoint(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        summary="How many tokens a conversation has.",
        tag="Anthropic",
        body=Conversation,
        refused=MESSAGES_REFUSED,
        example={"messages": [{"role": "user", "content": "Hello"}]},
        answers={200: TokenCount},
    ),
    Endpoint(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings,
        summary="Vectors of texts: what the served model makes of them, pooled.",
        tag="OpenAI",
        body=EmbeddingRequest,
        refused=EMBEDDINGS_REFUSED,
        example={"input": ["a text", "another"]},
        answers={200: EmbeddingList},
        errors=(501,),
    ),
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=_models,
        summary="The model that is served, under each of its names.",
        tag="OpenAI",
        answers={200: ModelList},
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{model:path}",
        handler=_model,
        summary="One model, by its name.",
        tag="OpenAI",
        answers={200: ModelCard},
        errors=(404,),
    ),
    Endpoint(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        summary="The token ids of a text, or of a conversation through the chat template.",
        tag="Tokens",
        body=TokenizeRequest,
        refused=TOKENIZE_REFUSED,
        example={"prompt": "Hello"},
        answers={200: Tokenized},
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        summary="The text of token ids.",
        tag="Tokens",
        body=DetokenizeRequest,
        example={"tokens": [1, 2, 3]},
        answers={200: Detokenized},
    ),
    Endpoint(
        method="GET",
        path="/health",
        handler=_health,
        summary="Whether requests are answered: 503 while the model loads, after the engine died, in a shutdown.",
        tag="Server",
        answers={200: Health, 503: Health},
    ),
    Endpoint(
        method="GET",
        path="/health/live",
        handler=_live,
        summary="Whether the process runs, while the model loads too.",
        tag="Server",
        answers={200: Health},
    ),
    Endpoint(
        method="GET",
        path="/metrics",
        handler=metrics,
        summary="Numbers for Prometheus.",
        tag="Server",
        answers={200: Text("text/plain")},
    ),
    Endpoint(
        method="GET",
        path="/version",
        handler=version,
        summary="The version of Atlas.",
        tag="Server",
        answers={200: Version},
    ),
    Endpoint(
        method="GET",
        path="/server_info",
        handler=server_info,
        summary="What runs, why, with which settings, and how full it is.",
        tag="Server",
        answers={200: ServerInfo},
    ),
    Endpoint(
        method="GET",
        path="/openapi.json",
        handler=_openapi,
        summary="This API as an OpenAPI 3.1 document.",
        tag="Server",
        answers={200: dict[str, Any]},
    ),
    Endpoint(
        method="GET",
        path="/docs",
        handler=_docs,
        summary="The same as a page to read.",
        tag="Server",
        answers={200: Text("text/html")},
    ),
)
