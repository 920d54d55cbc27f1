"""What goes wrong with /v1/responses, and how it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from responses_server import TOOL, ask
from serve_harness import RunningServer, Start, eventually, make_checkpoint


@pytest.fixture
def client(reasoner: RunningServer) -> openai.OpenAI:
    return reasoner.openai()


def test_a_stream_that_breaks_in_the_middle_is_a_failed_response(client: openai.OpenAI) -> None:
    events = list(ask(client, seed=4, stream=True))
    assert [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error" and "not finite" in last.response.error.message
    stored = client.responses.retrieve(last.response.id)
    assert stored.status == "failed" and stored.output_text == last.response.output_text != ""
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, seed=4)
    assert caught.value.code == "generation_failed"


def test_who_goes_away_ends_the_work_and_leaves_nothing(reasoner: RunningServer, client: openai.OpenAI) -> None:
    before = len(reasoner.events("abort"))
    with ask(client, seed=3, stream=True) as stream:
        events = iter(stream)
        opening = next(events).response
        assert any(event.type == "response.output_text.delta" for event in events)
    eventually(lambda: len(reasoner.events("abort")) == before + 1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(opening.id)
    with pytest.raises(httpx.ReadTimeout):
        reasoner.http.post("/v1/responses", json={"input": "x", "seed": 3}, timeout=0.3)
    eventually(lambda: len(reasoner.events("abort")) == before + 2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 999}, "temperature"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "sub"}]}},
            "tool_choice.tools[0].name",
        ),
        ({"input": [{"role": "user", "content": "x" * 9000}]}, "input"),
        ({"model": "other"}, "model"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"properties": {"a": {"type": "no"}}}}}},
            "text.format.schema.properties.a.type",
        ),
        (
            {"tools": [{**TOOL, "parameters": {"properties": {"a": {"type": "no"}}}}], "tool_choice": "required"},
            "tools[0].parameters.properties.a.type",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_errors_name_the_fields_of_this_api(reasoner: RunningServer, body: dict[str, Any], param: str) -> None:
    answer = reasoner.http.post("/v1/responses", json={"input": "x", **body})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param and error["code"]
    assert error["message"].startswith(param)


def test_a_model_without_a_template_says_so(start: Start, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "bare", chat_template=None)
    answer = start(model=model).wait_ready().http.post("/v1/responses", json={"input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")
    assert answer.json()["error"]["param"] == "input"


def test_a_stream_that_takes_too_long_is_a_response_that_failed(start: Start) -> None:
    server = start("--request-timeout", "0.4").wait_ready()
    events = list(server.openai().responses.create(input="x", stream=True, extra_body={"seed": 3}))
    last = events[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert "0.4 s" in last.response.error.message and "slow" in last.response.output_text
    kept = server.openai().responses.retrieve(last.response.id)
    assert kept.status == "failed" and kept.output_text == last.response.output_text
