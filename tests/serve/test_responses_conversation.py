"""Bodies of /v1/responses: the chat request that each stands for, and the field that an error names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from atlas.serve.errors import ApiError
from atlas.serve.openai.requests import ChatRequest, SamplingFields
from atlas.serve.openai.responses_conversation import Conversation
from atlas.serve.openai.responses_items import Item, complete, items_of, seal
from atlas.serve.openai.responses_request import REFUSED, ResponseRequest, chat_request, parse
from atlas.text.tools import chosen


def read(body: dict[str, Any]) -> ResponseRequest:
    return parse(json.dumps(body).encode())[0]


def converse(items: Sequence[Any], instructions: str | None = None, *, knows_developer: bool = False) -> Conversation:
    conversation = Conversation()
    request = read({"input": list(items)})
    conversation.extend(request.input, [f"input[{n}]" for n in range(len(items))])  # type: ignore[arg-type]
    if instructions is not None:
        conversation.instruct(instructions, knows_developer=knows_developer)
    return conversation


def shown(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages without what is not set."""
    result = []
    for message in conversation.messages:
        data = {key: value for key, value in msgspec.to_builtins(message).items() if value is not None}
        if calls := data.get("tool_calls"):
            data["tool_calls"] = [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in calls]
        result.append(data)
    return result


USER = {"role": "user", "content": "q"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
CALL_2 = {**CALL, "call_id": "c2", "name": "g"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "one"}
OUTPUT_2 = {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "so"}]}
TURN = {"role": "assistant", "content": "so"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([USER], [USER]),
        ([{**USER, "type": "message"}], [USER]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        ([{"role": "developer", "content": "d"}, USER], [{"role": "developer", "content": "d"}, USER]),
        ([USER, SAID, USER], [USER, TURN, USER]),
        ([USER, {"role": "assistant", "content": "so"}], [USER, TURN]),
        ([{**SAID, "content": [{"type": "refusal", "refusal": "no"}]}], [{"role": "assistant", "content": "no"}]),
        # What one answer gave back as several items is one turn.
        ([REASONING, SAID], [{**TURN, "reasoning_content": "hm"}]),
        (
            [REASONING, SAID, CALL, CALL_2, OUTPUT, OUTPUT_2],
            [
                {
                    **TURN,
                    "reasoning_content": "hm",
                    "tool_calls": [("c1", "f", '{"a": 1}'), ("c2", "g", '{"a": 1}')],
                },
                {"role": "tool", "content": "one", "tool_call_id": "c1"},
                {"role": "tool", "content": "two", "tool_call_id": "c2"},
            ],
        ),
        (
            [CALL, OUTPUT, CALL_2, OUTPUT_2],
            [
                {"role": "assistant", "tool_calls": [("c1", "f", '{"a": 1}')]},
                {"role": "tool", "content": "one", "tool_call_id": "c1"},
                {"role": "assistant", "tool_calls": [("c2", "g", '{"a": 1}')]},
                {"role": "tool", "content": "two", "tool_call_id": "c2"},
            ],
        ),
        (
            [SAID, CALL, REASONING, SAID],
            [
                {
                    "role": "assistant",
                    "content": "soso",
                    "reasoning_content": "hm",
                    "tool_calls": [("c1", "f", '{"a": 1}')],
                }
            ],
        ),
        # Two answers of an assistant, one after another, stay two.
        ([SAID, SAID], [TURN, TURN]),
        ([SAID, REASONING, SAID], [TURN, {**TURN, "reasoning_content": "hm"}]),
        ([REASONING, USER], [{"role": "assistant", "reasoning_content": "hm"}, USER]),
        ([{**REASONING, "content": []}, SAID, {**REASONING, "content": None}, USER], [TURN, USER]),
        # Reasoning, wherever its text is.
        (
            [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": seal("é")}],
            [{"role": "assistant", "reasoning_content": "é"}],
        ),
        (
            [{"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}],
            [{"role": "assistant", "reasoning_content": "s"}],
        ),
        (
            [{**REASONING, "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": seal("e")}],
            [{"role": "assistant", "reasoning_content": "hm"}],
        ),
    ],
)
def test_items_become_messages(items: list[Any], messages: list[Any]) -> None:
    conversation = converse(items)
    assert shown(conversation) == messages
    assert len(conversation.where) == len(messages)
    # Through the store it is the same.
    kept: list[Item] = [complete(item) for item in read({"input": items}).input]  # type: ignore[arg-type,misc]
    again = Conversation()
    again.extend(items_of(msgspec.json.encode(kept)), "x")
    assert shown(again) == messages


@pytest.mark.parametrize(
    ("items", "knows_developer", "roles", "first"),
    [
        ([USER], False, ["system", "user"], "be brief"),
        ([{"role": "system", "content": "s"}, USER], True, ["system", "user"], "be brief\n\ns"),
        ([{"role": "developer", "content": "d"}, USER], False, ["system", "user"], "be brief\n\nd"),
        ([{"role": "developer", "content": "d"}, USER], True, ["system", "developer", "user"], "be brief"),
        ([USER, {"role": "system", "content": "s"}], False, ["system", "user", "system"], "be brief"),
    ],
)
def test_instructions_are_the_one_system_message_at_the_beginning(
    items: list[Any], knows_developer: bool, roles: list[str], first: str
) -> None:
    conversation = converse(items, "be brief", knows_developer=knows_developer)
    assert [message.role for message in conversation.messages] == roles
    assert conversation.messages[0].content == first and conversation.where[0] == "instructions"
    assert len(conversation.where) == len(roles)


def test_every_sampling_field_reaches_the_chat_request() -> None:
    given: dict[str, Any] = {
        "model": "m",
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.4,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"5": 1.0},
        "seed": 7,
        "stop": ["x"],
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "priority": 2,
        "stream": True,
        "user": "u",
        "structured_outputs": {"choice": ["a"]},
        "guided_json": {},
        "guided_regex": "a",
        "guided_choice": ["a"],
        "guided_grammar": "a",
        "json_schema": {},
        "regex": "a",
        "ebnf": "a",
        "grammar": "a",
    }
    assert set(given) == set(SamplingFields.__struct_fields__), "a new field: give it a value here"
    chat, _ = chat_request(read({"input": "x", **given}), Conversation())
    assert {name: getattr(chat, name) for name in given} == given


TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
TOOL_2 = {"type": "function", "name": "g", "parameters": None}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_output_tokens": 5}, {"max_tokens": 5}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"enable_thinking": False, "thinking_budget": 9}, {"enable_thinking": False, "thinking_budget": 9}),
        ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True, "description": None},
                }
            },
        ),
        (
            {"tools": [TOOL]},
            {"tools": [{"type": "function", "function": {key: TOOL[key] for key in TOOL if key != "type"}}]},
        ),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
    ],
)
def test_fields_become_those_of_a_chat_request(body: dict[str, Any], expected: dict[str, Any]) -> None:
    chat, _ = chat_request(read({"input": "x", **body}), Conversation())
    neutral, _ = chat_request(read({"input": "x"}), Conversation())
    changed = {
        name: value for name, value in msgspec.to_builtins(chat).items() if value != msgspec.to_builtins(neutral)[name]
    }
    assert changed == expected
    assert all(name in ChatRequest.__struct_fields__ for name in expected)


def test_allowed_tools_are_those_of_a_chat_request() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    chat, names = chat_request(read({"input": "x", "tools": [TOOL, TOOL_2], "tool_choice": allowed}), Conversation())
    tools, choice = chosen(chat.tools or [], chat.tool_choice)
    assert [tool.function.name for tool in tools] == ["g"] and choice == "required"
    assert names["tool_choice.allowed_tools.tools[0].function"] == "tool_choice.tools[0]"


PART = {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": 7}, "input", "invalid_value"),
        ({"input": []}, "input", "empty_array"),
        ({"input": [USER, 7]}, "input[1]", "invalid_value"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content", "missing_required_parameter"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type", "unsupported_item"),
        ({"input": [{"type": 7}]}, "input[0].type", "unsupported_item"),
        ({"input": [{}]}, "input[0].type", "missing_required_parameter"),
        ({"input": [USER, PART]}, "input[1].content[0].type", "unsupported_content"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": ""}]},
            "input[0].call_id",
            "missing_required_parameter",
        ),
        ({"input": [{**OUTPUT, "output": [{"type": "input_file"}]}]}, "input[0].output[0].type", "invalid_value"),
        ({"input": "x", "tools": [TOOL, {"type": "code_interpreter"}]}, "tools[1].type", "unsupported_parameter"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"input": "x", "tool_choice": "any"}, "tool_choice", "invalid_value"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_parameter"),
        ({"input": "x", "truncation": "some"}, "truncation", "invalid_value"),
        ({"input": "x", "service_tier": "flex"}, "service_tier", "unsupported_parameter"),
        ({"input": "x", "text": {"verbosity": "high"}}, "text.verbosity", "unsupported_parameter"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        ({"input": "x", "reasoning": {"summary": "concise"}}, "reasoning.summary", "unsupported_parameter"),
        (
            {"input": "x", "reasoning": {"summary": "auto", "generate_summary": "detailed"}},
            "reasoning.generate_summary",
            "invalid_value",
        ),
        ({"input": "x", "reasoning": {"context": "all_turns"}}, "reasoning.context", "unsupported_parameter"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"input": "x", "include": ["all"]}, "include[0]", "invalid_value"),
        ({"input": "x", "background": True, "store": False}, "background", "invalid_value"),
        (
            {"input": "x", "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "invalid_value",
        ),
        ({"input": "x", "max_tool_calls": -1}, "max_tool_calls", "invalid_value"),
        ({"input": "x", "metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
        ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata.k", "invalid_value"),
        ({"input": "x", "metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
        ({"input": "x", "metadata": {"k": 1}}, "metadata[...]", "invalid_value"),
        *(({"input": "x", name: "some"}, name, "unsupported_parameter") for name in REFUSED),
    ],
)
def test_an_error_names_the_field(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(body)
    error = caught.value
    assert (error.status, error.body.param, error.body.code) == (400, param, code)
    assert error.body.message.startswith(param)


@pytest.mark.parametrize(
    ("items", "param", "code"),
    [
        ([USER, OUTPUT], "input[1].call_id", "unknown_call_id"),
        ([CALL, OUTPUT_2], "input[1].call_id", "unknown_call_id"),
        (
            [USER, {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAA"}],
            "input[1].encrypted_content",
            "invalid_encrypted_content",
        ),
    ],
)
def test_an_item_that_fits_no_conversation_is_named(items: list[Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        converse(items)
    assert (caught.value.body.param, caught.value.body.code) == (param, code)


def test_unknown_fields_are_reported_wherever_they_are() -> None:
    body = {
        "input": [
            {**USER, "phase": None, "mood": "x"},
            {**CALL, "extra": 1, "namespace": None, "caller": None, "parsed_arguments": None},
        ],
        "text": {"format": {"type": "text", "x": 1}, "y": 2},
        "tools": [{**TOOL, "defer_loading": True}],
        "z": 3,
    }
    _, ignored = parse(json.dumps(body).encode())
    assert set(ignored) == {
        "input[0].mood",
        "input[1].extra",
        "text.format.x",
        "text.y",
        "tools[0].defer_loading",
        "z",
    }
