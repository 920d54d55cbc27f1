"""The Messages API through the official `anthropic` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from tests.clients.asking import CAPITAL, GREEDY, STORY, TURNS
from tests.serve.real_server import MODEL, RealServer

# The newest clients have no argument for the temperature.
SHORT: Any = {"model": MODEL, "max_tokens": 12, "extra_body": {"temperature": 0}}
ENDLESS: Any = {"model": MODEL, "max_tokens": 900, "extra_body": {"temperature": 0, "ignore_eos": True}}
ANSWER = "The capital of France is Paris."
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def claude(server: RealServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def chat(client: openai.OpenAI, messages: Any) -> Any:
    return client.chat.completions.create(messages=messages, **GREEDY)


def test_a_message_is_what_chat_says(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    message, answer = claude.messages.create(messages=CAPITAL, **SHORT), chat(client, CAPITAL)
    assert text_of(message) == answer.choices[0].message.content == ANSWER
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        MODEL,
        "end_turn",
    )
    assert message.stop_sequence is None and message.id.startswith("msg_")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )


def test_the_limit_of_tokens(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    message = claude.messages.create(messages=STORY, **SHORT)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)
    assert text_of(message) == chat(client, STORY).choices[0].message.content


@pytest.mark.parametrize("system", ["Your name is Zorblax.", [{"type": "text", "text": "Your name is Zorblax."}]])
def test_a_system_prompt(claude: anthropic.Anthropic, client: openai.OpenAI, system: Any) -> None:
    question: Any = {"role": "user", "content": "What is your name?"}
    message = claude.messages.create(messages=[question], system=system, **SHORT)
    answer = chat(client, [{"role": "system", "content": "Your name is Zorblax."}, question])
    assert text_of(message) == answer.choices[0].message.content
    assert message.usage.input_tokens == answer.usage.prompt_tokens


def test_a_history_with_blocks(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    first = claude.messages.create(messages=TURNS[:1], **SHORT)
    more: Any = [TURNS[0], {"role": "assistant", "content": first.content}, TURNS[2]]
    blocks: Any = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    assert text_of(claude.messages.create(messages=more, **SHORT))
    assert text_of(claude.messages.create(messages=blocks, **SHORT)) == chat(client, TURNS).choices[0].message.content


def test_a_stop_sequence(claude: anthropic.Anthropic) -> None:
    for stream in (False, True):
        options = {**SHORT, "stop_sequences": ["never", " is"]}
        if stream:
            with claude.messages.stream(messages=CAPITAL, **options) as events:
                message = events.get_final_message()
        else:
            message = claude.messages.create(messages=CAPITAL, **options)
        assert (text_of(message), message.stop_reason) == ("The capital of France", "stop_sequence")
        assert message.stop_sequence == " is"


def test_the_events_of_a_stream(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=STORY, **SHORT)
    events = list(claude.messages.create(messages=STORY, stream=True, **SHORT))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) <= {"content_block_delta", "ping"}
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")  # type: ignore[union-attr]
    assert text == text_of(whole)
    start, delta = events[0].message, events[-2]  # type: ignore[union-attr]
    assert start.content == [] and start.usage.input_tokens == whole.usage.input_tokens
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("max_tokens", 12)  # type: ignore[union-attr]


def test_the_stream_helper(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(messages=CAPITAL, **SHORT) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == text_of(final) == ANSWER and len(pieces) > 3
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 8


def test_asynchronous(server: RealServer) -> None:
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
            whole = await claude.messages.create(messages=CAPITAL, **SHORT)
            async with claude.messages.stream(messages=CAPITAL, **SHORT) as stream:
                streamed = "".join([text async for text in stream.text_stream])
            return [text_of(whole), streamed]

    assert asyncio.run(ask()) == [ANSWER, ANSWER]


def test_counted_tokens_are_those_of_the_prompt(claude: anthropic.Anthropic) -> None:
    for options in ({}, {"system": "Be brief."}, {"tools": [WEATHER]}):
        counted = claude.messages.count_tokens(model=MODEL, messages=CAPITAL, **options).input_tokens  # type: ignore[arg-type]
        used = claude.messages.create(messages=CAPITAL, **{**SHORT, "max_tokens": 1}, **options).usage.input_tokens
        assert counted == used > 20


def test_thinking_is_a_block_of_its_own(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    thinking: Any = {"type": "adaptive"}
    message = claude.messages.create(messages=CAPITAL, thinking=thinking, **SHORT)
    same = client.chat.completions.create(messages=CAPITAL, extra_body={"enable_thinking": True}, **GREEDY)
    (block,) = message.content
    assert block.type == "thinking"
    assert block.thinking == same.choices[0].message.reasoning_content  # type: ignore[attr-defined]
    with claude.messages.stream(messages=CAPITAL, thinking=thinking, **SHORT) as stream:
        pieces = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert "".join(pieces) == block.thinking == final.content[0].thinking  # type: ignore[union-attr]
    more: Any = [*CAPITAL, {"role": "assistant", "content": message.content}, {"role": "user", "content": "And now?"}]
    assert text_of(claude.messages.create(messages=more, **SHORT))


def test_calls_and_results_in_the_history(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain."}]}
    history: Any = [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result]},
    ]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
    same: Any = [
        history[0],
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Rain."},
    ]
    function = {**WEATHER, "parameters": WEATHER["input_schema"]}
    del function["input_schema"]
    answer = client.chat.completions.create(messages=same, tools=[{"type": "function", "function": function}], **GREEDY)
    message = claude.messages.create(messages=history, tools=[WEATHER], **SHORT)
    assert message.usage.input_tokens == answer.usage.prompt_tokens
    assert text_of(message) == answer.choices[0].message.content


class Animal(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    wild: bool


def test_structured_output(claude: anthropic.Anthropic) -> None:
    options: Any = {**SHORT, "max_tokens": 40, "messages": [{"role": "user", "content": "Describe a cat."}]}
    parsed = claude.messages.parse(output_format=Animal, **options)
    assert isinstance(parsed.parsed_output, Animal) and parsed.stop_reason == "end_turn"
    config: Any = {"format": {"type": "json_schema", "schema": Animal.model_json_schema()}}
    with claude.messages.stream(output_config=config, **options) as stream:
        text = "".join(stream.text_stream)
    assert Animal.model_validate_json(text) == parsed.parsed_output


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
def test_a_forced_call(claude: anthropic.Anthropic, choice: Any) -> None:
    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    city = {"type": "string", "enum": ["Paris", "Rome"]}
    tool = {**WEATHER, "input_schema": {**WEATHER["input_schema"], "properties": {"city": city}}}
    options: Any = {**SHORT, "max_tokens": 60, "messages": question, "tools": [tool]}
    options["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    message = claude.messages.create(**options)
    (use,) = message.content
    assert (use.type, use.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert use.input["city"] in ("Paris", "Rome")
    with claude.messages.stream(**options) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(parts)) == final.content[0].input == use.input  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}
    more: Any = [*question, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert text_of(claude.messages.create(**{**options, "messages": more, "tool_choice": {"type": "none"}}))


def test_the_models(claude: anthropic.Anthropic) -> None:
    assert [model.id for model in claude.models.list()] == [MODEL]


def test_raw_responses_have_headers(claude: anthropic.Anthropic) -> None:
    raw = claude.messages.with_raw_response.create(
        messages=CAPITAL, **{**SHORT, "extra_body": {"temperature": 0, "made_up": 1}}
    )
    assert raw.headers["request-id"] and raw.headers["x-atlas-ignored-fields"] == "made_up"
    message = raw.parse()
    assert message._request_id == raw.headers["request-id"] and text_of(message) == ANSWER


def test_closing_a_stream_frees_its_sequence(server: RealServer, claude: anthropic.Anthropic) -> None:
    server.idle()
    with claude.messages.stream(messages=STORY, **ENDLESS) as stream:
        next(iter(stream.text_stream))
    server.idle(5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "x"),
        ("temperature", -1),
        ("top_p", 3),
        ("messages", []),
        ("messages", [{"role": "wizard", "content": "x"}]),
        ("system", 5),
        ("stop_sequences", "x"),
        ("tools", [{"name": "x"}]),
        ("tool_choice", {"type": "sometimes"}),
        ("thinking", {"type": "deep"}),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_value_names_its_field(claude: anthropic.Anthropic, field: str, value: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(messages=CAPITAL, model=MODEL, max_tokens=12, extra_body={field: value})
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"] and body["error"]["param"].startswith(field)
    assert caught.value.request_id == body["request_id"]


def test_every_class_of_error(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(messages=CAPITAL, **{**SHORT, "model": "claude-9"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.PermissionDeniedError):
        claude.messages.create(messages=CAPITAL, **SHORT, extra_headers={"Origin": "https://evil.example"})
    with pytest.raises(anthropic.BadRequestError) as long:
        claude.messages.create(messages=[{"role": "user", "content": "word " * 1500}], **SHORT)
    assert "1023" in str(long.value)
    with pytest.raises(anthropic.APITimeoutError):
        claude.with_options(timeout=0.3).messages.create(messages=STORY, **ENDLESS)
