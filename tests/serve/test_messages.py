"""/v1/messages over the official client, on the engine that says what it was told to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import ModelInfo
from serve_harness import ANSWER, SPECIAL, RunningServer, Start, behaviour, eventually, make_checkpoint

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|user|>tools {{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.role }}:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})#{{ c.id }}{% endfor %}"
    "{% if m.tool_call_id %}@{{ m.name }}#{{ m.tool_call_id }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
THINK = "<think>\nLet me see 😀\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 😀", "days": 3}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEXTS = {
    "call": f"{THINK}I look.\n{CALL}",
    "calls": f"{CALL}\n{NOW}",
    "thought": f"{THINK}Grüezi!",
    "broken": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": ',
    "late": f"{CALL}\nand then",
}
SEEDS = {name: 100 + 10 * place for place, name in enumerate(TEXTS)}
GROUPS = (1, 2, 3, 7, 1000)
"""How many tokens the engine puts into one output: seed SEEDS[name] + place."""

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "Tells it",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TOOLS = [WEATHER, {"name": "now", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("messages")
    model = make_checkpoint(folder / "tiny", chat_template=TEMPLATE)
    behaviours = {
        str(SEEDS[name] + place): behaviour(text, group=group)
        for name, text in TEXTS.items()
        for place, group in enumerate(GROUPS)
    }
    behaviours |= {
        "1": behaviour("abcDEFGHIJklm"),
        "2": behaviour("uvwxyz", end=None),
        "3": behaviour("slow ", end=None, delay=0.05),
        "5": behaviour('{"number": 7}'),
        "4": behaviour("broken", error_after=3, delay=0.05),
    }
    script = {"default": behaviour(ANSWER), "behaviours": behaviours, "max_context": 4096}
    found = RunningServer(folder, script, model, "--tool-parser", "hermes", "--reasoning-parser", "think")
    try:
        yield found.wait_ready()
    finally:
        found.close()


def client(server: RunningServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        **{"base_url": server.url, "api_key": "none", "max_retries": 0, "timeout": 10, **options}
    )


def fields_of(seed: int | None, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a call of the client; what its signature does not have goes beside it."""
    told = {"model": "tiny", "max_tokens": 256, "messages": HI, **fields}
    extra = {name: told.pop(name) for name in ("temperature", "top_p", "top_k", "chat_template_kwargs") if name in told}
    return {**told, "extra_body": extra | ({} if seed is None else {"seed": seed})}


def create(server: RunningServer, seed: int | None = None, **fields: Any) -> Any:
    return client(server).messages.create(**fields_of(seed, fields))


def stream(server: RunningServer, seed: int | None = None, **fields: Any) -> Any:
    """The final message of the client's stream helper."""
    with client(server).messages.stream(**fields_of(seed, fields)) as events:
        return events.get_final_message()


def plain(message: Any) -> dict[str, Any]:
    """A message without what is different each time."""
    value: dict[str, Any] = message.to_dict()
    assert re.fullmatch("msg_[0-9a-f]{24}", value.pop("id"))
    for block in value["content"]:
        if block["type"] == "tool_use":
            assert re.fullmatch("[A-Za-z0-9_-]+", block.pop("id"))
        block.pop("parsed_output", None)
    return value


def kinds(message: Any) -> list[str]:
    return [block.type for block in message.content]


def last(server: RunningServer) -> dict[str, Any]:
    entry: dict[str, Any] = server.events("submit")[-1]
    return entry


def prompt_text(server: RunningServer) -> str:
    """What the engine was given last, special tokens by their names."""
    data = b""
    for token in last(server)["prompt"]:
        data += SPECIAL[token].encode() if token < len(SPECIAL) else bytes([token - len(SPECIAL)])
    return data.decode()


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


CALLED = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
IMAGE = [{"role": "user", "content": [{"type": "image"}]}]


def refused(server: RunningServer, kind: type[anthropic.APIStatusError], **fields: Any) -> dict[str, Any]:
    with pytest.raises(kind) as caught:
        create(server, **fields)
    error = caught.value
    assert type(error) is kind and error.request_id and error.error_code == error.body["error"]["code"]
    body: dict[str, Any] = error.body
    assert body["type"] == "error" and body["request_id"] == error.request_id
    return body["error"]


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
