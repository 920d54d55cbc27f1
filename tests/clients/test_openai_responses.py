"""The Responses API through the official `openai` client."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from tests.clients.asking import CAPITAL, GREEDY, STORY, TURNS
from tests.serve.real_server import MODEL, RealServer
from tests.serve.serve_harness import eventually

QUESTION = CAPITAL[0]["content"]
SHORT: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
ENDLESS: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}


def chat(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(messages=messages, **{**GREEDY, **options})


def test_a_response_is_what_chat_says(client: openai.OpenAI) -> None:
    response = client.responses.create(input=QUESTION, **SHORT)
    answer = chat(client, CAPITAL)
    assert response.output_text == answer.choices[0].message.content
    assert (response.status, response.model, response.error, response.incomplete_details) == (
        "completed",
        MODEL,
        None,
        None,
    )
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    assert response.usage.total_tokens == answer.usage.total_tokens
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": QUESTION}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
    ],
    ids=["message", "item"],
)
def test_input_in_its_other_forms(client: openai.OpenAI, given: Any) -> None:
    assert client.responses.create(input=given, **SHORT).output_text == "The capital of France is Paris."


def test_instructions_are_a_system_message(client: openai.OpenAI) -> None:
    response = client.responses.create(input="What is your name?", instructions="Your name is Zorblax.", **SHORT)
    turns: Any = [
        {"role": "system", "content": "Your name is Zorblax."},
        {"role": "user", "content": "What is your name?"},
    ]
    assert response.output_text == chat(client, turns).choices[0].message.content
    assert response.instructions == "Your name is Zorblax."


def test_a_history_of_items(client: openai.OpenAI) -> None:
    assert client.responses.create(input=TURNS, **SHORT).output_text == chat(client, TURNS).choices[0].message.content


def test_a_conversation_goes_on_by_id(client: openai.OpenAI) -> None:
    first = client.responses.create(input=TURNS[0]["content"], **SHORT)
    second = client.responses.create(input=TURNS[2]["content"], previous_response_id=first.id, **SHORT)
    turns = [TURNS[0], {"role": "assistant", "content": first.output_text}, TURNS[2]]
    assert second.output_text == chat(client, turns).choices[0].message.content
    assert second.previous_response_id == first.id
    alone = client.responses.create(input=TURNS[2]["content"], **SHORT)
    assert second.usage is not None and alone.usage is not None
    assert second.usage.input_tokens > alone.usage.input_tokens


def test_an_answer_may_be_sent_back_as_items(client: openai.OpenAI) -> None:
    first = client.responses.create(input=QUESTION, **SHORT)
    more: Any = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "And of Germany?"}]
    by_items = client.responses.create(input=more, **SHORT)
    by_id = client.responses.create(input="And of Germany?", previous_response_id=first.id, **SHORT)
    assert by_items.output_text == by_id.output_text and by_items.usage == by_id.usage


def test_kept_retrieved_listed_deleted(client: openai.OpenAI) -> None:
    response = client.responses.create(input=TURNS, metadata={"a": "b"}, **SHORT)
    kept = client.responses.retrieve(response.id)
    assert kept == response and kept.metadata == {"a": "b"}
    items = client.responses.input_items.list(response.id, order="asc").data
    assert [item.role for item in items] == [turn["role"] for turn in TURNS]  # type: ignore[union-attr]
    assert [item.content[0].text for item in items] == [turn["content"] for turn in TURNS]  # type: ignore[union-attr]
    newest = client.responses.input_items.list(response.id, limit=1)
    assert newest.data == items[-1:] and newest.has_more
    assert len(list(client.responses.input_items.list(response.id, limit=1))) == 3  # the client asks for each page
    client.responses.delete(response.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            gone(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="x", previous_response_id=response.id, **SHORT)
    assert caught.value.param == "previous_response_id"


def test_what_is_not_stored_is_not_kept(client: openai.OpenAI) -> None:
    response = client.responses.create(input=QUESTION, store=False, **SHORT)
    assert response.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_an_answer_that_was_cut_says_so(client: openai.OpenAI) -> None:
    response = client.responses.create(input=STORY, **SHORT)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == chat(client, STORY).choices[0].message.content


@pytest.mark.parametrize("messages", [CAPITAL, STORY], ids=["ends", "cut"])
def test_the_events_of_a_stream(client: openai.OpenAI, messages: Any) -> None:
    whole = client.responses.create(input=messages, **SHORT)
    events = list(client.responses.create(input=messages, stream=True, **SHORT))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    last = "completed" if messages is CAPITAL else "incomplete"
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", last]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    final = events[-1].response  # type: ignore[union-attr]
    assert (final.output_text, final.status, final.usage) == (whole.output_text, whole.status, whole.usage)
    assert client.responses.retrieve(final.id) == final


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(input=QUESTION, **SHORT) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "The capital of France is Paris."


def test_asynchronous(server: RealServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole = await client.responses.create(input=QUESTION, **SHORT)
            stream = await client.responses.create(input=QUESTION, stream=True, **SHORT)
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return [whole.output_text, "".join(deltas)]

    assert asyncio.run(ask()) == ["The capital of France is Paris."] * 2


def test_in_the_background(client: openai.OpenAI) -> None:
    response = client.responses.create(input=QUESTION, background=True, **SHORT)
    assert response.status in ("queued", "in_progress")

    def ended() -> Any:
        kept = client.responses.retrieve(response.id)
        return kept.status == "completed" and kept

    assert eventually(ended, 20).output_text == "The capital of France is Paris."


def test_cancelling_in_the_background_frees_the_sequence(server: RealServer, client: openai.OpenAI) -> None:
    server.idle()
    response = client.responses.create(input=STORY, background=True, **ENDLESS)
    eventually(lambda: server.info()["engine"]["running"] == 1, 10)
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    server.idle(5)
    assert client.responses.retrieve(response.id).status == "cancelled"


def test_closing_a_stream_frees_the_sequence(server: RealServer, client: openai.OpenAI) -> None:
    server.idle()
    with client.responses.create(input=STORY, stream=True, **ENDLESS) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    server.idle(5)


def test_log_probabilities(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    response = client.responses.create(input=QUESTION, include=include, top_logprobs=2, **SHORT)
    entries = response.output[0].content[0].logprobs  # type: ignore[union-attr]
    plain = chat(client, CAPITAL, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.token for entry in entries] == [entry.token for entry in plain][: len(entries)]
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in plain][: len(entries)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_output_tokens", -1),
        ("temperature", -1),
        ("top_p", "x"),
        ("input", 7),
        ("input", []),
        ("input", [{"role": "wizard", "content": "x"}]),
        ("previous_response_id", "resp_none"),
        ("instructions", [1]),
        ("metadata", {"a": 5}),
        ("include", ["nothing.like.it"]),
        ("truncation", "sideways"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_value_names_its_field(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"input": QUESTION, **SHORT, field: value})
    assert str(caught.value.param).startswith(field) and caught.value.code


def test_a_model_that_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(input="x", model="gpt-9")
    assert caught.value.param == "model"


def test_seconds_are_those_of_now(client: openai.OpenAI) -> None:
    assert abs(client.responses.create(input=QUESTION, **SHORT).created_at - time.time()) < 60
