"""/v1/messages over the official client, on the engine that says what it was told to."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pydantic
import pytest
from messages_harness import (
    GROUPS,
    HI,
    SEEDS,
    TEXTS,
    TOOLS,
    WEATHER,
    client,
    create,
    fields_of,
    kinds,
    last,
    plain,
    prompt_text,
    refused,
    stream,
)
from serve_harness import ANSWER, RunningServer


@pytest.fixture
def server(messages_server: RunningServer) -> RunningServer:
    return messages_server


def test_an_answer(server: RunningServer) -> None:
    message = create(server)
    assert message.content[0].text == ANSWER and kinds(message) == ["text"]
    assert (message.role, message.type, message.model) == ("assistant", "message", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(ANSWER.encode()) + 1
    assert message.usage.input_tokens == len(last(server)["prompt"])
    assert message.usage.cache_read_input_tokens == message.usage.cache_creation_input_tokens == 0
    assert message._request_id.startswith("req_")
    assert prompt_text(server) == "<s><|user|>user:hi<|eot|><|assistant|>"


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("place", range(len(GROUPS)))
def test_a_stream_is_the_answer_in_pieces(server: RunningServer, name: str, place: int) -> None:
    fields = {"tools": TOOLS, "max_tokens": 4096}
    assert plain(stream(server, SEEDS[name] + place, **fields)) == plain(create(server, SEEDS[name], **fields))


def test_any_cut_of_an_answer(server: RunningServer) -> None:
    """Every `max_tokens`, each with another grouping of tokens."""
    length = len(TEXTS["call"].encode())
    for most in range(1, length + 1, 7):
        fields = {"tools": TOOLS, "max_tokens": most}
        one = plain(create(server, SEEDS["call"], **fields))
        assert plain(stream(server, SEEDS["call"] + most % len(GROUPS), **fields)) == one
        assert one["stop_reason"] == "max_tokens" and one["usage"]["output_tokens"] == most
        for block in one["content"]:
            if block["type"] == "tool_use":
                # Whole arguments or none of it.
                full = {"city": "Zürich 😀", "days": 3}
                assert block["name"] == "weather" and block["input"].items() <= full.items()


def test_thinking_and_a_call(server: RunningServer) -> None:
    message = create(server, SEEDS["call"], tools=TOOLS)
    thinking, text, call = message.content
    assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert thinking.thinking == "Let me see 😀" and thinking.signature.startswith("atlas-signature-")
    assert text.text == "I look."
    assert (call.name, call.input) == ("weather", {"city": "Zürich 😀", "days": 3})
    assert message.stop_reason == "tool_use"
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


def test_several_calls(server: RunningServer) -> None:
    message = create(server, SEEDS["calls"], tools=TOOLS)
    assert [(call.name, call.input) for call in message.content] == [
        ("weather", {"city": "Zürich 😀", "days": 3}),
        ("now", {}),
    ]
    assert len({call.id for call in message.content}) == 2
    one = create(server, SEEDS["calls"], tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [call.name for call in one.content] == ["weather"] and one.stop_reason == "tool_use"


def test_a_call_that_the_model_left_unfinished(server: RunningServer) -> None:
    message = create(server, SEEDS["broken"], tools=TOOLS)
    assert (message.content[0].input, message.stop_reason) == ({"city": "Zürich"}, "end_turn")


def test_without_tools_nothing_is_a_call(server: RunningServer) -> None:
    assert create(server, SEEDS["calls"]).content[0].text == TEXTS["calls"]
    message = create(server, SEEDS["calls"], tools=TOOLS, tool_choice={"type": "none"})
    assert kinds(message) == ["text"] and message.stop_reason == "end_turn"


def test_a_round_with_tools(server: RunningServer) -> None:
    first = create(server, SEEDS["call"], tools=TOOLS, system="Be brief.")
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert create(server, tools=TOOLS, system="Be brief.", messages=history).content[0].text == ANSWER
    tools, *turns = prompt_text(server).split("<|eot|>")
    assert [tool["function"]["name"] for tool in json.loads(tools.removeprefix("<s><|user|>tools "))] == [
        "weather",
        "now",
    ]
    assert json.loads(tools.removeprefix("<s><|user|>tools "))[0]["function"]["parameters"] == WEATHER["input_schema"]
    assert turns == [
        "<|user|>system:Be brief.",
        "<|user|>user:hi",
        f'<|assistant|>assistant:(Let me see 😀)I look.weather({{"city": "Zürich 😀", "days": 3}})#{call.id}',
        f"<|user|>tool:sunny@weather#{call.id}",
        "<|assistant|>",
    ]


def test_results_of_tools(server: RunningServer) -> None:
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "now", "input": {}} for n in range(4)]
    results = [
        {"type": "tool_result", "tool_use_id": "c0"},
        {"type": "tool_result", "tool_use_id": "c1", "content": "no network", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        {"type": "tool_result", "tool_use_id": "c3", "content": [], "is_error": True},
        {"type": "text", "text": "and now?"},
    ]
    history = [*HI, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    create(server, messages=history)
    assert prompt_text(server).split("<|eot|>")[2:-1] == [
        "<|user|>tool:@now#c0",
        "<|user|>tool:Error: no network@now#c1",
        "<|user|>tool:a\nb@now#c2",
        "<|user|>tool:Error@now#c3",
        "<|user|>user:and now?",
    ]


def test_a_last_turn_of_the_assistant_is_gone_on_with(server: RunningServer) -> None:
    for content in ("{", [{"type": "text", "text": "{"}]):
        fields = {"messages": [*HI, {"role": "assistant", "content": content}]}
        message = create(server, **fields)
        assert message.content[0].text == ANSWER
        assert prompt_text(server) == "<s><|user|>user:hi<|eot|><|assistant|>assistant:{"
        counted = client(server).messages.count_tokens(model="tiny", **fields)
        assert counted.input_tokens == message.usage.input_tokens


def test_neighbours_of_one_role_are_one_turn(server: RunningServer) -> None:
    def text(role: str, *texts: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": one} for one in texts]}

    create(server, messages=[*HI, text("user", "a", "b"), text("assistant", "c"), text("assistant", "d"), *HI])
    assert prompt_text(server).split("<|eot|>")[:-1] == [
        "<s><|user|>user:hi\na\nb",
        "<|assistant|>assistant:c\nd",
        "<|user|>user:hi",
    ]


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"


@pytest.mark.parametrize(
    ("system", "rendered"),
    [
        ("You are", "<s><|user|>system:You are<|eot|>"),
        ("", "<s>"),
        ([], "<s>"),
        (
            [{"type": "text", "text": "You are"}, {"type": "text", "text": "kind"}],
            "<s><|user|>system:You are\nkind<|eot|>",
        ),
        ([{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}], "<s><|user|>system:A<|eot|>"),
        (f"{BILLING}\nYou are", "<s><|user|>system:You are<|eot|>"),
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "A"}], "<s><|user|>system:A<|eot|>"),
        ([{"type": "text", "text": BILLING}], "<s>"),
        (f"Say {BILLING}", f"<s><|user|>system:Say {BILLING}<|eot|>"),
    ],
)
def test_system_prompts(server: RunningServer, system: Any, rendered: str) -> None:
    create(server, system=system)
    assert prompt_text(server) == f"{rendered}<|user|>user:hi<|eot|><|assistant|>"


@pytest.mark.parametrize(
    ("stops", "text", "reason", "stop"),
    [
        (["DEFGHIJ"], "abc", "stop_sequence", "DEFGHIJ"),
        (["GHI", "DE"], "abc", "stop_sequence", "DE"),
        (["EFX"], "abcDEFGHIJklm", "end_turn", None),
        (["m"], "abcDEFGHIJkl", "stop_sequence", "m"),
        ([], "abcDEFGHIJklm", "end_turn", None),
    ],
)
def test_stop_sequences(server: RunningServer, stops: list[str], text: str, reason: str, stop: str | None) -> None:
    message = create(server, 1, stop_sequences=stops)
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (text, reason, stop)
    assert plain(stream(server, 1, stop_sequences=stops)) == plain(message)


def test_lengths(server: RunningServer) -> None:
    message = create(server, 2, max_tokens=4)
    assert (message.content[0].text, message.stop_reason, message.usage.output_tokens) == ("uvwx", "max_tokens", 4)
    assert plain(stream(server, 2, max_tokens=4)) == plain(message)
    room = 4096 - message.usage.input_tokens
    assert create(server, 2, max_tokens=room).stop_reason == "max_tokens"
    full = create(server, 2, max_tokens=room + 1)
    assert (full.stop_reason, full.usage.output_tokens) == ("model_context_window_exceeded", room)


def test_thinking_is_asked_for_by_the_templates_switch(server: RunningServer) -> None:
    create(server, thinking={"type": "disabled"})
    assert prompt_text(server).endswith("<|assistant|><think>\n\n</think>\n\n")
    for asked in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}):
        create(server, max_tokens=2048, thinking=asked)
        assert prompt_text(server).endswith("<|assistant|>")
    assert last(server)["sampling"]["thinking"]["budget"] == 1024


def test_thinking_that_is_not_shown_goes_on(server: RunningServer) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    first = create(server, SEEDS["thought"], thinking=thinking)
    assert plain(stream(server, SEEDS["thought"], thinking=thinking)) == plain(first)
    assert kinds(first) == ["thinking", "text"] and first.content[0].thinking == ""
    create(server, messages=[*HI, {"role": "assistant", "content": first.content}, *HI])
    assert "<|assistant|>assistant:(Let me see 😀)Grüezi!<|eot|>" in prompt_text(server)


def test_thinking_of_other_servers_is_taken(server: RunningServer) -> None:
    blocks = [
        {"type": "thinking", "thinking": "so", "signature": "EqQBCkYIARgC"},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy"},
        {"type": "text", "text": "ok"},
    ]
    raw = client(server).messages.with_raw_response.create(
        **fields_of(None, {"messages": [*HI, {"role": "assistant", "content": blocks}, *HI]})
    )
    assert "<|assistant|>assistant:(so)ok<|eot|>" in prompt_text(server)
    assert raw.headers["x-atlas-ignored-fields"] == "messages[].content[].data"


def test_sampling(server: RunningServer) -> None:
    create(server, 7, temperature=0.25, top_p=0.5, top_k=3, metadata={"user_id": "me"})
    expected = {"max_tokens": 256, "temperature": 0.25, "top_p": 0.5, "top_k": 3, "seed": 7}
    assert last(server)["sampling"].items() >= expected.items()


def test_a_format_becomes_a_grammar(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "schema": schema}
    create(server, output_config={"format": wanted})
    grammar = last(server)["sampling"]["grammar"]
    assert grammar["syntax"] == "json_schema" and json.loads(grammar["text"]) == schema
    bad = {**wanted, "schema": {"type": "object", "properties": {"a": {"type": "int"}}}}
    error = refused(server, anthropic.BadRequestError, output_config={"format": bad})
    assert error["code"] == "invalid_grammar" and error["param"].startswith("output_config.format.schema")
    error = refused(server, anthropic.BadRequestError, output_config={"format": {"type": "text"}})
    assert error["param"] == "output_config.format.type"


def test_forced_calls_are_grammars(server: RunningServer) -> None:
    fields = {"tools": TOOLS, "tool_choice": {"type": "any"}}
    message = create(server, SEEDS["calls"], **fields)
    either = last(server)["sampling"]["grammar"]
    assert message.stop_reason == "tool_use" and "weather" in either["text"] and "now" in either["text"]
    assert plain(stream(server, SEEDS["calls"], **fields)) == plain(message)
    create(server, SEEDS["calls"], **{**fields, "tool_choice": {"type": "tool", "name": "weather"}})
    only = last(server)["sampling"]["grammar"]
    assert "weather" in only["text"] and "now" not in only["text"]
    create(server, SEEDS["calls"], **{**fields, "tool_choice": {"type": "auto"}})
    assert last(server)["sampling"]["grammar"] is None
    wrong = {**WEATHER, "input_schema": {"type": "object", "properties": {"city": {"type": "text"}}}}
    error = refused(server, anthropic.BadRequestError, tools=[TOOLS[1], wrong], tool_choice={"type": "any"})
    assert error["code"] == "invalid_grammar" and error["param"].startswith("tools.1.input_schema")


class Number(pydantic.BaseModel):
    number: int


def test_the_clients_own_helpers(server: RunningServer) -> None:
    parsed = client(server).messages.parse(**fields_of(5, {}), output_format=Number)
    assert parsed.parsed_output == Number(number=7)
    schema = json.loads(last(server)["sampling"]["grammar"]["text"])
    assert schema["properties"]["number"]["type"] == "integer"
    beta = client(server).beta.messages.create(
        **fields_of(SEEDS["call"], {"tools": TOOLS, "betas": ["made-up-2030-01-01"]})
    )
    assert [block.type for block in beta.content] == ["thinking", "text", "tool_use"]

    asked = []

    @anthropic.beta_tool
    def weather(city: str, days: int) -> str:
        """Tells it."""
        asked.append((city, days))
        return "sunny"

    runner = client(server).beta.messages.tool_runner(
        **fields_of(SEEDS["call"], {"tools": [weather], "max_iterations": 3})
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 3
    assert asked[:2] == [("Zürich 😀", 3)] * 2
    # It is told that the server keeps no conversation, and sends all of it.
    assert prompt_text(server).count("tool:sunny@weather#") == 2 and "user:hi" in prompt_text(server)


CONVERSATIONS: list[dict[str, Any]] = [
    {},
    {"system": [{"type": "text", "text": "You are"}], "tools": TOOLS},
    {"thinking": {"type": "disabled"}},
    {"messages": [*HI, {"role": "assistant", "content": "<|eot|>"}, {"role": "user", "content": "😀" * 20}]},
]


@pytest.mark.parametrize("fields", CONVERSATIONS)
def test_counting_tokens(server: RunningServer, fields: dict[str, Any]) -> None:
    counted = client(server).messages.count_tokens(**{"model": "tiny", "messages": HI, **fields})
    assert counted.input_tokens == create(server, **fields).usage.input_tokens


def test_counting_a_conversation_that_does_not_fit(server: RunningServer) -> None:
    long = [{"role": "user", "content": "x" * 9000}]
    counted = client(server).messages.count_tokens(model="tiny", messages=long).input_tokens
    assert counted == 9009
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(server, messages=long)
    error = caught.value
    assert "prompt is too long: 9009 tokens > 4095 maximum" in str(error)
    assert error.body["error"]["code"] == "context_length_exceeded"


def test_the_events_of_a_stream(server: RunningServer) -> None:
    body = {"messages": HI, "max_tokens": 64, "stream": True}
    with server.http.stream("POST", "/v1/messages?beta=true", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["request-id"] == response.headers["x-request-id"]
        events = response.read().decode().split("\n\n")
    assert events.pop() == ""
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    values = [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in events]
    assert names == [value["type"] for value in values]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert values[0]["message"]["content"] == [] and values[0]["message"]["stop_reason"] is None
