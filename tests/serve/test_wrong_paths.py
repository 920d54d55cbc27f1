"""Requests that reach no endpoint: what they are told, and what the log and the metrics say of them."""

from __future__ import annotations

import asyncio
import logging
import re

import httpx
import openai
import pytest
from asgi import Answer, ask
from starlette.types import ASGIApp

from atlas.api_keys import digest
from atlas.config import ServeConfig
from atlas.serve.app import create_app
from atlas.serve.reference.endpoint import Endpoint
from atlas.serve.routes import ENDPOINTS
from atlas.serve.service import Service
from atlas.serve.telemetry.tracking import Record

LIST = "; GET /docs shows those that there are"
KEY = [("host", "localhost"), ("authorization", "Bearer k"), ("content-type", "application/json")]


def make_app() -> tuple[ASGIApp, list[Record]]:
    """A server that has not loaded, whose key is "k", and the records of its requests."""
    service = Service(ServeConfig(model="m"))
    records: list[Record] = []
    service.finished.append(records.append)
    return create_app(service, [digest(b"k")], ["localhost"]), records


def told(path: str, method: str = "POST") -> Answer:
    return asyncio.run(ask(make_app()[0], method, path, KEY))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (KEY[:1], 401),
        ([("host", "elsewhere.example")], 403),
        ([*KEY, ("origin", "http://elsewhere.example")], 403),
        ([KEY[0], KEY[1], ("content-type", "text/plain")], 415),
        (KEY, 503),
    ],
)
@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("POST", "/nowhere", "other"),
    ],
)
def test_whoever_refuses_a_request_its_endpoint_is_known(
    headers: list[tuple[str, str]], status: int, method: str, path: str, route: str
) -> None:
    app, records = make_app()
    answer = asyncio.run(ask(app, method, path, headers))
    assert records[0].endpoint == route
    assert answer.status == (404 if status == 503 and route == "other" else status)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: f"{one.method} {one.path}")
def test_every_endpoint_is_known_by_its_route(endpoint: Endpoint) -> None:
    path = endpoint.path.replace("{response_id}", "resp_1").replace("{model:path}", "a/b")
    app, records = make_app()
    asyncio.run(ask(app, endpoint.method, path, [("host", "elsewhere.example")]))
    assert (records[0].endpoint, records[0].status) == (endpoint.path, 403)


def test_a_get_without_a_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atlas.requests")
    app, _ = make_app()
    asyncio.run(ask(app, "GET", "/v1/models", KEY))
    assert not caplog.records
    asyncio.run(ask(app, "GET", "/v1/models", KEY[:1]))
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == ["GET /v1/models 401"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "; did you mean /v1/chat/completions? give the client a base_url that ends in /v1"),
        ("/responses/r/cancel", "; did you mean /v1/responses/r/cancel? give the client a base_url that ends in /v1"),
        ("/v1/v1/embeddings", "; did you mean /v1/embeddings? give the client a base_url that has /v1 once"),
        ("/v1/v1/messages", "; did you mean /v1/messages? give Anthropic's client a base_url without /v1"),
        ("/messages", "; did you mean /v1/messages?"),
        ("/v1/chat/completions/", "; did you mean /v1/chat/completions?"),
        ("/v1/messages//", "; did you mean /v1/messages?"),
        ("/health/", "; did you mean /health?"),
        ("/", LIST),
        ("/v1", LIST),
        ("/v1/nothing", LIST),
        ("/v1/v1/nothing", LIST),
        ("/api/chat", LIST),
        ("/v1/" + "x" * 100_000, LIST),
        ("/v1chat/completions", f"; did you mean /v1/chat/completions? {LIST[2:]}"),
        ("/v1/completion", f"; did you mean /v1/completions? {LIST[2:]}"),
    ],
)
def test_a_wrong_path_is_told_the_right_one(path: str, hint: str) -> None:
    answer = told(path)
    error = answer.error()
    assert (answer.status, error["code"], error["message"]) == (
        404,
        "unknown_endpoint",
        f"{path[:200]}: there is no such endpoint{hint}",
    )
    assert (b'"type":"error"' in answer.body) == ("/messages" in path)


def test_the_official_client_shows_the_hint() -> None:
    http = httpx.Client(transport=httpx.MockTransport(_in_process))
    with pytest.raises(openai.NotFoundError, match="base_url that ends in /v1"):
        openai.OpenAI(api_key="k", base_url="http://localhost", http_client=http).models.list()


def _in_process(request: httpx.Request) -> httpx.Response:
    headers = [(name, value) for name, value in request.headers.items() if name in ("host", "content-type")]
    answer = asyncio.run(ask(make_app()[0], request.method, request.url.path, [*headers, KEY[1]]))
    return httpx.Response(answer.status, headers=answer.headers, content=answer.body)


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW", "get")


@pytest.mark.parametrize("path", sorted({endpoint.path for endpoint in ENDPOINTS}))
def test_a_wrong_method_is_told_the_right_ones(path: str) -> None:
    given = path.replace("{response_id}", "resp_1").replace("{model:path}", "a/b")
    # One path may be an endpoint of its own and the name of a response.
    known = [
        one for one in ENDPOINTS if re.fullmatch(re.sub(r"{[^:}]*}", "[^/]+", one.path), given) or one.path == path
    ]
    allowed = {endpoint.method for endpoint in known}
    allowed |= {"HEAD"} if "GET" in allowed else set()
    for method in METHODS:
        answer = told(given, method)
        if method in allowed:
            assert answer.status not in (404, 405) or answer.error()["code"] in (
                "model_not_found",
                "response_not_found",
            )
            continue
        assert answer.status == 405 and answer.headers["content-type"] == "application/json"
        told_allowed = sorted(answer.headers["allow"].split(", "))
        assert {*told_allowed} <= allowed and (len({one.path for one in known}) > 1 or {*told_allowed} == allowed)
        error = answer.error()
        assert error["message"] == f"{method} {given}: Method Not Allowed; accepted: {', '.join(told_allowed)}"
        assert error["code"] == "method_not_allowed" and error["type"] == "invalid_request_error"
        assert (b'"type":"error"' in answer.body) == given.startswith("/v1/messages")
