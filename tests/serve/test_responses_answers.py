"""Answers of /v1/responses through the official client, in one piece and as streams."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItemList
from responses_server import MODEL, TOOL, ask
from serve_harness import ANSWER, RunningServer


@pytest.fixture
def client(reasoner: RunningServer) -> openai.OpenAI:
    return reasoner.openai()


def neutral(response: Any) -> dict[str, Any]:
    """Without ids of its own and times."""
    text = re.sub(r'"(resp|msg|rs|fc|call)_[0-9a-f]+"', r'"\1"', json.dumps(response.to_dict(mode="json")))
    data: dict[str, Any] = json.loads(text)
    return {key: value for key, value in data.items() if key not in ("created_at", "completed_at")}


def test_an_answer_has_the_shape_of_the_official_types(reasoner: RunningServer, client: openai.OpenAI) -> None:
    given: dict[str, Any] = {
        "metadata": {"k": "v"},
        "instructions": "be brief",
        "temperature": 0.5,
        "top_p": 0.9,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "truncation": "auto",
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        "store": True,
    }
    answer = ask(client, **given)
    assert answer.output_text == ANSWER and answer.status == "completed"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        len(reasoner.events("submit")[-1]["prompt"]),
        len(ANSWER.encode()) + 1,
    )
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert {name: answer.to_dict()[name] for name in given} == given
    raw = reasoner.http.get(f"/v1/responses/{answer.id}").json()
    # As strict as the client can be; and what is read again is what was given.
    assert Response.model_validate(raw).to_dict() == answer.to_dict() == client.responses.retrieve(answer.id).to_dict()
    listed = reasoner.http.get(f"/v1/responses/{answer.id}/input_items").json()
    ResponseItemList.model_validate(listed)


@pytest.mark.parametrize("seed", [1, 7, 8, 9])
@pytest.mark.parametrize("options", [{}, {"max_output_tokens": 30}, {"reasoning": {"summary": "auto"}}])
def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, seed: int, options: dict[str, Any]) -> None:
    options = {**options, "tools": [TOOL], "include": ["reasoning.encrypted_content"]}
    whole = ask(client, seed=seed, **options)
    events = list(ask(client, seed=seed, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert neutral(events[-1].response) == neutral(whole)
    assert events[-1].type == f"response.{whole.status}"
    # It was stored before its end was told.
    assert client.responses.retrieve(events[-1].response.id).to_dict() == events[-1].response.to_dict()
    if whole.status == "completed":
        with client.responses.stream(model=MODEL, input="Hello", extra_body={"seed": seed}, **options) as stream:
            final = stream.get_final_response()
        assert final.output_text == whole.output_text
        assert [item.type for item in final.output] == [item.type for item in whole.output]


def test_reasoning_text_and_calls_are_items_of_their_own(client: openai.OpenAI) -> None:
    answer = ask(client, seed=7, tools=[TOOL])
    reasoning, message, call = answer.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "to add", [])
    assert (message.type, answer.output_text) == ("message", "Let me see.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1, "b": 2})
    assert answer.status == call.status == "completed" and call.call_id and call.id != call.call_id
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.tools[0].name == "add" and answer.tools[0].parameters == TOOL["parameters"]


def test_reasoning_comes_as_the_summary_where_one_is_asked_for(client: openai.OpenAI) -> None:
    events = list(ask(client, seed=7, stream=True, reasoning={"summary": "detailed"}))
    (reasoning, *_) = events[-1].response.output
    assert [part.text for part in reasoning.summary] == ["to add"] and reasoning.content is None
    deltas = [event.delta for event in events if event.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "to add"
    assert not any(event.type == "response.reasoning_text.delta" for event in events)


def test_a_cut_answer_is_incomplete_and_says_why(client: openai.OpenAI) -> None:
    for seed, options in ((2, {}), (9, {"max_output_tokens": 12}), (7, {"max_output_tokens": 60, "tools": [TOOL]})):
        answer = ask(client, seed=seed, **{"max_output_tokens": 20, **options})
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[-1].status == "incomplete"
        assert answer.usage.output_tokens == answer.max_output_tokens


@pytest.mark.parametrize("asked", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_logprobs_are_those_of_a_chat_answer(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        logprobs=True,
        top_logprobs=asked.get("top_logprobs"),
    )
    assert chat.choices[0].logprobs is not None
    expected = [one.to_dict() for one in chat.choices[0].logprobs.content or ()]
    answer = ask(client, **asked)
    (part,) = answer.output[0].content
    assert [one.to_dict() for one in part.logprobs] == expected and expected
    events = list(ask(client, stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == [one["token"] for one in expected]
    Response.model_validate(events[-1].response.to_dict())
    assert client.responses.retrieve(answer.id, include=["message.output_text.logprobs"]).id == answer.id
    assert ask(client).output[0].content[0].logprobs == []


@pytest.mark.parametrize("seed", [7, 8])
def test_logprobs_of_reasoning_and_calls_are_not_those_of_text(client: openai.OpenAI, seed: int) -> None:
    answer = ask(client, seed=seed, tools=[TOOL], include=["message.output_text.logprobs"])
    (message,) = [item for item in answer.output if item.type == "message"]
    assert "".join(one.token for one in message.content[0].logprobs).strip() == "Let me see."


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("given", "response_format"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        ),
    ],
)
def test_a_text_format_asks_for_what_a_response_format_does(
    reasoner: RunningServer, client: openai.OpenAI, given: Any, response_format: Any
) -> None:
    answer = ask(client, text={"format": given})
    assert answer.text.to_dict()["format"] == {"description": None, **given} if "schema" in given else given
    wanted = reasoner.events("submit")[-1]["sampling"]["grammar"]
    messages: Any = [{"role": "user", "content": "Hello"}]
    client.chat.completions.create(model=MODEL, messages=messages, response_format=response_format)
    assert reasoner.events("submit")[-1]["sampling"]["grammar"] == wanted
    assert (wanted is None) == (given["type"] == "text")


@pytest.mark.parametrize(
    ("choice", "same"),
    [
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_a_forced_call_is_that_of_a_chat_request(
    reasoner: RunningServer, client: openai.OpenAI, choice: Any, same: Any
) -> None:
    answer = ask(client, tools=[TOOL], tool_choice=choice)
    assert answer.to_dict()["tool_choice"] == choice
    wanted = reasoner.events("submit")[-1]["sampling"]["grammar"]
    function = {name: value for name, value in TOOL.items() if name != "type"}
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        tool_choice=same,
    )
    assert reasoner.events("submit")[-1]["sampling"]["grammar"] == wanted is not None


def test_obfuscation_makes_deltas_of_one_size(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_obfuscation": True}}
    deltas = [event for event in ask(client, seed=8, **options) if event.type.endswith(".delta")]
    assert deltas and all((len(one.delta.encode()) + len(one.obfuscation)) % 32 == 0 for one in deltas)
    assert all("obfuscation" not in event.to_dict() for event in ask(client, seed=8, stream=True))


def test_events_have_names_and_no_done_marker(reasoner: RunningServer) -> None:
    text = reasoner.http.post("/v1/responses", json={"input": "x", "stream": True}).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    for name, data in blocks:
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert blocks[0][0] == "event: response.created" and blocks[-1][0] == "event: response.completed"
