"""Every class of error of the official client, and what it does by itself about those that pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.clients.asking import CAPITAL, GREEDY
from tests.serve.real_server import MODEL, RealServer
from tests.serve.serve_harness import ANSWER, RunningServer, behaviour, free_port, make_checkpoint

YO: Any = [{"role": "user", "content": "yo"}]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Servers whose engine does what a test says: refuses, fails, is slow."""
    servers: list[RunningServer] = []

    def start(*flags: str, **script: Any) -> RunningServer:
        folder = tmp_path / f"scripted{len(servers)}"
        model = make_checkpoint(folder / "model")
        behaviours = {"3": behaviour("slow ", end=None, delay=0.02), "4": behaviour("broken", error_after=3, delay=0.1)}
        script = {"default": behaviour(ANSWER), "behaviours": behaviours, **script}
        servers.append(RunningServer(folder, script, model, *flags))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def details(error: openai.APIStatusError) -> dict[str, Any]:
    """The body of an error, which must have all of its parts."""
    body: Any = error.body
    assert isinstance(body, dict) and body["message"] and body["type"] and body["code"] and "param" in body
    assert error.request_id == error.response.headers["x-request-id"] == body["request_id"]
    return body


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("n", 0),
        ("n", True),
        ("max_tokens", -5),
        ("max_completion_tokens", "many"),
        ("stop", ["ok", ""]),
        ("stop", 5),
        ("presence_penalty", 99),
        ("frequency_penalty", [1]),
        ("logit_bias", {"1000000": 1}),
        ("logit_bias", {"one": 1}),
        ("top_logprobs", 3),
        ("seed", 1.5),
        ("messages", []),
        ("messages", "hello"),
        ("stream", "yes"),
        ("user", 7),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_value_is_a_bad_request_that_names_its_field(client: openai.OpenAI, field: str, value: Any) -> None:
    fields = {"messages": CAPITAL, **GREEDY, field: value}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**fields)
    body = details(caught.value)
    assert body["type"] == "invalid_request_error" and body["param"].startswith(field)
    assert field in body["message"] and caught.value.code == body["code"] and caught.value.param == body["param"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 7}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ({"content": "x"}, "messages[1].role"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        (None, "messages[1]"),
    ],
)
def test_a_bad_message_is_named_by_its_path(client: openai.OpenAI, message: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=[*CAPITAL, message], **GREEDY)
    assert details(caught.value)["param"] == param


def test_a_prompt_that_is_too_long_is_told_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=[{"role": "user", "content": "word " * 1500}], **GREEDY)
    body = details(caught.value)
    assert (body["code"], body["param"]) == ("context_length_exceeded", "messages")
    assert "1023" in body["message"] and "15" in body["message"]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(messages=CAPITAL, **{**GREEDY, "model": "gpt-9"})
    body = details(caught.value)
    assert (body["code"], body["param"], MODEL in body["message"]) == ("model_not_found", "model", True)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_an_unknown_endpoint_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt="a cat")
    assert details(caught.value)["code"] == "unknown_endpoint"


def test_a_page_of_another_site_is_forbidden(client: openai.OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError) as caught:
        client.chat.completions.create(messages=CAPITAL, **GREEDY, extra_headers={"Origin": "https://evil.example"})
    assert details(caught.value)["type"] == "permission_error"


def test_a_key_that_is_wrong_or_missing(scripted: Callable[..., RunningServer]) -> None:
    server = scripted("--api-key", "sk-right").wait_ready()
    client = server.openai()
    with pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model="tiny", messages=YO)
    assert details(caught.value)["code"] == "invalid_api_key"
    right = client.with_options(api_key="sk-right")
    name = right.models.list().data[0].id
    assert right.chat.completions.create(model=name, messages=YO).choices[0].message.content == ANSWER


def test_a_server_that_is_not_there() -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{free_port()}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_an_engine_that_fails_ends_one_request(scripted: Callable[..., RunningServer]) -> None:
    server = scripted().wait_ready()
    client, name = server.openai(), server.openai().models.list().data[0].id
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=name, messages=YO, seed=4)
    assert details(caught.value)["code"] == "generation_failed"
    text = ""
    with pytest.raises(openai.APIError) as broken:  # after the first chunks: an event in the stream
        for chunk in client.chat.completions.create(model=name, messages=YO, seed=4, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert "broken".startswith(text) and text and broken.value.code == "generation_failed"
    assert client.chat.completions.create(model=name, messages=YO).choices[0].message.content == ANSWER


def test_while_it_loads_a_client_tries_again(scripted: Callable[..., RunningServer]) -> None:
    server = scripted(load_seconds=1.5)
    while server.health() is None:
        time.sleep(0.02)
    client = server.openai()
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=YO)
    assert caught.value.status_code == 503 and details(caught.value)["code"] == "server_loading"
    assert int(caught.value.response.headers["retry-after"]) > 0
    patient = client.with_options(max_retries=3, timeout=30)
    name = patient.models.list().data[0].id
    assert patient.chat.completions.create(model=name, messages=YO).choices[0].message.content == ANSWER


def test_a_limit_that_is_reached_is_waited_for(scripted: Callable[..., RunningServer]) -> None:
    server = scripted("--max-concurrent", "1").wait_ready()
    client = server.openai()
    name = client.models.list().data[0].id
    stream = client.chat.completions.create(model=name, messages=YO, seed=3, max_tokens=500, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=name, messages=YO)
    body = details(caught.value)
    assert body["type"] == "rate_limit_error" and int(caught.value.response.headers["retry-after"]) > 0
    timer = threading.Timer(0.5, stream.close)
    timer.start()
    answer = client.with_options(max_retries=5, timeout=30).chat.completions.create(model=name, messages=YO)
    timer.join()
    assert answer.choices[0].message.content == ANSWER


def test_the_server_is_well_after_all_that(server: RealServer) -> None:
    """What cannot be said through the client at all."""
    for content in (b"", b"[]", b"{", b'"x"', b'{"messages": [{"role": "user", "content": "\xff"}]}', b"[" * 100_000):
        answer = httpx.post(
            server.url + "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json", content[:20]
    assert "Paris" in server.chat(CAPITAL, temperature=0, max_tokens=12).choices[0].message.content
