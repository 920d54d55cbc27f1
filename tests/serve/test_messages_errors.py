"""What goes wrong at /v1/messages, as the official client hears of it; keys, limits, and names of models."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import ModelInfo
from messages_harness import HI, TOOLS, WEATHER, client, fields_of, refused
from serve_harness import RunningServer, Start, eventually

CALLED = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
IMAGE = [{"role": "user", "content": [{"type": "image"}]}]


@pytest.fixture
def server(messages_server: RunningServer) -> RunningServer:
    return messages_server


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "empty_array"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0.type",
            "unsupported_content",
        ),
        ({"messages": [*HI, {"role": "assistant", "content": [CALLED]}]}, "messages", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"top_p": 2}, "top_p", "invalid_value"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences.1", "invalid_value"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "invalid_value"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type", "unsupported_parameter"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name", "invalid_value"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0.input_schema.type", "invalid_value"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "invalid_value"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens", "invalid_value"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value"),
    ],
)
def test_wrong_fields_are_named_as_the_caller_wrote_them(
    server: RunningServer, fields: dict[str, Any], param: str, code: str
) -> None:
    error = refused(server, anthropic.BadRequestError, **fields)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"].startswith(f"{param}: ")


def test_other_errors(server: RunningServer) -> None:
    error = refused(server, anthropic.NotFoundError, model="other")
    assert (error["type"], error["code"], error["param"]) == ("not_found_error", "model_not_found", "model")
    response = server.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    error = refused(server, anthropic.InternalServerError, seed=4)
    assert (error["type"], error["code"]) == ("api_error", "generation_failed")


def test_a_stream_that_breaks_off(server: RunningServer) -> None:
    text = ""
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client(server).messages.stream(**fields_of(4, {})) as events,
    ):
        for piece in events.text_stream:
            text += piece
    assert text == "br"
    assert caught.value.body["error"]["type"] == "api_error"
    assert caught.value.body["error"]["code"] == "generation_failed"


def test_a_client_that_goes_away(server: RunningServer) -> None:
    before = len(server.events("abort"))
    with client(server).messages.stream(**fields_of(3, {})) as events:
        next(iter(events.text_stream))
    assert eventually(lambda: server.events("abort")[before:])[-1]["known"]


def test_limits_are_errors_of_this_api(start: Start) -> None:
    server = start("--requests-per-minute", "2", "--request-timeout", "0.5").wait_ready()
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client(server).messages.stream(**fields_of(3, {})) as events,
    ):
        events.until_done()
    assert caught.value.body["error"]["type"] == "timeout_error"
    error = refused(server, anthropic.GatewayTimeoutError, seed=3)
    assert (error["type"], error["code"]) == ("timeout_error", "request_timed_out")
    error = refused(server, anthropic.RateLimitError)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


def test_a_server_that_is_not_ready(start: Start) -> None:
    server = start(load_seconds=60)
    eventually(lambda: server.health() == 503, 20)
    error = refused(server, anthropic.ServiceUnavailableError)
    assert error["type"] == "overloaded_error" and "loading" in error["message"]


def test_names_of_models_that_are_not_ours(start: Start) -> None:
    flags = [flag for name in ("own", "*", "other") for flag in ("--served-model-name", name)]
    server = start(*flags).wait_ready()
    for name in ("own", "other", "claude-of-some-day"):
        message = client(server).messages.create(**{**fields_of(None, {}), "model": name})
        assert message.model == "own" and message.content
    assert [model.id for model in server.openai().models.list()] == ["own", "other"]
    assert server.openai().models.retrieve("other").id == "other"
    page = client(server).models.list()
    assert [model.id for model in page] == ["own", "other"] and not page.has_next_page()
    model = ModelInfo.model_validate_json(server.http.get("/v1/models/other").content)
    assert (model.display_name, model.created_at.timestamp()) == (
        "other",
        client(server).models.retrieve("own").created,
    )


def test_keys(start: Start) -> None:
    server = start("--api-key", "sk-atlas").wait_ready()
    here = client(server)
    assert here.with_options(api_key="sk-atlas").messages.create(**fields_of(None, {})).content
    bearer = anthropic.Anthropic(base_url=server.url, auth_token="sk-atlas")
    assert bearer.messages.create(**fields_of(None, {})).content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        here.messages.create(**fields_of(None, {}))
    assert caught.value.body["error"]["type"] == "authentication_error"
    response = httpx.post(f"{server.url}/v1/messages/count_tokens", json={"model": "tiny", "messages": HI})
    assert (response.status_code, response.json()["type"]) == (401, "error")
