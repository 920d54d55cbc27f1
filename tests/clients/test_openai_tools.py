"""Tool calls through the official client. A model of this size makes none by itself: they are forced."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.clients.asking import CAPITAL, GREEDY
from tests.serve.real_server import MODEL

CITY: Any = {"type": "string", "enum": ["Paris", "Rome", "Zürich"]}
SCHEMAS: Any = {
    "get_weather": {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "set_light": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"To {name}", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris tomorrow?"}]


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def ask(client: openai.OpenAI, messages: Any = WEATHER, **options: Any) -> Any:
    return client.chat.completions.create(messages=messages, **{**GREEDY, "max_tokens": 80, "tools": TOOLS, **options})


def valid(call: Any) -> dict[str, Any]:
    """The arguments of a call, which must keep to the schema of its tool."""
    assert call.type == "function" and call.id
    arguments: dict[str, Any] = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMAS[call.function.name])
    return arguments


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_a_named_tool_is_called(client: openai.OpenAI, name: str, drawn: bool) -> None:
    options = {"temperature": 1.2, "seed": 5} if drawn else {}
    choice = ask(client, tool_choice=named(name), **options).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == name and not choice.message.content
    assert valid(call) and choice.finish_reason in ("tool_calls", "stop")


def test_some_tool_is_called(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="required").choices[0]
    # How many calls it makes is the model's affair; the last may be cut.
    whole = choice.message.tool_calls if choice.finish_reason == "tool_calls" else choice.message.tool_calls[:-1]
    assert whole and all(valid(call) for call in whole)
    one = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1


@pytest.mark.parametrize("choice", ["required", named("get_weather")], ids=["required", "named"])
def test_a_stream_is_the_whole(client: openai.OpenAI, choice: Any) -> None:
    whole = ask(client, tool_choice=choice, parallel_tool_calls=False).choices[0]
    calls: dict[int, dict[str, str]] = {}
    finish = None
    pieces = 0
    for chunk in ask(client, tool_choice=choice, parallel_tool_calls=False, stream=True):
        for part in chunk.choices:
            assert not part.delta.content
            finish = part.finish_reason or finish
            for delta in part.delta.tool_calls or []:
                call = calls.setdefault(delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""})
                assert delta.id in (None, call["id"])
                call["arguments"] += delta.function.arguments or ""
                pieces += 1
    assert finish == whole.finish_reason and pieces > 2
    assert [(c["name"], c["arguments"]) for c in calls.values()] == [
        (c.function.name, c.function.arguments) for c in whole.message.tool_calls
    ]
    assert all(c["id"] for c in calls.values())


def test_the_stream_helper_gathers_the_call(client: openai.OpenAI) -> None:
    whole = ask(client, tool_choice=named("get_weather")).choices[0].message.tool_calls[0]
    with client.chat.completions.stream(
        messages=WEATHER, tools=TOOLS, tool_choice=named("get_weather"), **{**GREEDY, "max_tokens": 80}
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert done and final is not None
    assert final[0].function.arguments == done[0].arguments == whole.function.arguments


def test_auto_and_none_answer_in_text(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        message = ask(client, CAPITAL, tool_choice=choice, max_tokens=12).choices[0].message
        assert message.content and not message.tool_calls


def test_a_whole_round(client: openai.OpenAI) -> None:
    """Call, result, answer: the message goes back as it came."""
    first = ask(client, tool_choice=named("get_weather")).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Sunny, 21 degrees."}
    answer = ask(client, [*WEATHER, first, result], max_tokens=24).choices[0].message
    assert answer.content
    plain = ask(client, WEATHER, max_tokens=24)
    assert plain.usage.prompt_tokens < ask(client, [*WEATHER, first, result], max_tokens=1).usage.prompt_tokens


def test_the_responses_api(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 80, "tools": tools}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        whole = client.responses.create(input=WEATHER, tool_choice=choice, parallel_tool_calls=False, **options)
        (call,) = whole.output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        events = list(
            client.responses.create(
                input=WEATHER, tool_choice=choice, parallel_tool_calls=False, stream=True, **options
            )
        )
        deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert deltas == done.arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    answer = client.responses.create(
        input=[output], previous_response_id=whole.id, **{**options, "tool_choice": "none"}
    )
    assert answer.output_text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": named("unknown")}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_value_names_its_field(client: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **options)
    assert str(caught.value.param).startswith(param)
