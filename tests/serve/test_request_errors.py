"""Wrong requests: each gets an error in the OpenAI shape that names the field, and hurts nobody."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import pytest
from serve_harness import ANSWER, RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
YO = [{"role": "user", "content": "yo"}]
JSON = {"content-type": "application/json"}


def check(response: httpx.Response, status: int, code: str | None, param: str | None, *words: str) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    if code is not None:
        assert error["code"] == code
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"]


@pytest.fixture(autouse=True)
def the_next_good_request_works(shared: RunningServer) -> Any:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 2
    answer = shared.http.post(CHAT, json={"messages": YO}).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", ["JSON"]),
        (b"[]", ["array", "JSON object"]),
        (b"3", ["number"]),
        (b'{"messages": [{"role"', ["JSON"]),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', ["JSON"]),
        (b'{"messages": [{"role": "user", "content": "\\ude00"}]}', ["JSON"]),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', ["JSON"]),
        (b'{"temperature": NaN}', ["JSON"]),
        (b'{"temperature": 1e999}', ["JSON"]),
        (b"[" * 100_000, ["nested"]),
        (b'{"x": ' * 50_000, ["nested"]),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies(shared: RunningServer, path: str, body: bytes, words: list[str]) -> None:
    check(shared.http.post(path, content=body, headers=JSON), 400, "invalid_json", None, *words)


CHAT_FIELDS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"messages": []}, "messages", ["empty"]),
    ({"messages": None}, "messages", ["null", "list of ChatMessage"]),
    ({"messages": 3}, "messages", [": 3;", "list of ChatMessage"]),
    ({"messages": "x"}, "messages", ['"x"', "list of ChatMessage"]),
    ({"messages": [3]}, "messages[0]", [": 3;", "object with role"]),
    ({"messages": [{"content": "a"}]}, "messages[0].role", ["missing"]),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", [": 7;", "string or list of TextPart"]),
    ({"messages": [{"role": "user"}]}, "messages[0].content", ["absent"]),
    ({"messages": [{"role": "x", "content": "a"}]}, "messages[0].role", ['"x"', '"system" or "tool" or "user"']),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        ["image_url", "text parts only"],
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        ["missing"],
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", ["a tool message cannot come first"]),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ["at least 1"]),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens", ["3", "4"]),
    ({"tools": [{"type": "function"}]}, "tools[0].function", ["missing"]),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", ["no place for tools"]),
    ({"tool_choice": "required"}, "tool_choice", ["without tools"]),
    ({"functions": [{}]}, "functions", ["not supported", "send tools instead"]),
    ({"function_call": {"name": "f"}}, "function_call", ["not supported", "send tool_choice instead"]),
    ({"response_format": {"type": "json"}}, "response_format.type", ["'json'", "json_schema"]),
    ({"guided_regex": "a("}, "guided_regex", ["regex parse error"]),
    ({"top_logprobs": 3}, "top_logprobs", ["3", "logprobs is true"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "from 0 to 20"]),
    ({"logprobs": 3}, "logprobs", [": 3;", "boolean"]),
    ({"modalities": ["audio"]}, "modalities", ["not supported"]),
    ({"reasoning_effort": "much"}, "reasoning_effort", ["much"]),
    ({"enable_thinking": True}, "enable_thinking", ["reasoning on", "never reason"]),
    ({"thinking_budget": 3}, "thinking_budget", ["not supported"]),
    ({"store": True}, "store", ["not supported"]),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", ["the server sets"]),
]

COMMON_FIELDS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"max_tokens": 0}, "max_tokens", ["0", "at least 1"]),
    ({"max_tokens": -1}, "max_tokens", ["-1", "at least 1"]),
    ({"max_tokens": "5"}, "max_tokens", ['"5"', "integer"]),
    ({"max_tokens": 1.5}, "max_tokens", ["1.5", "integer"]),
    ({"max_tokens": True}, "max_tokens", ["true", "integer"]),
    ({"temperature": -0.1}, "temperature", ["-0.1", "from 0 to 100"]),
    ({"temperature": 1e300}, "temperature", ["from 0 to 100"]),
    ({"temperature": "hot"}, "temperature", ['"hot"', "number from 0 to 100"]),
    ({"top_p": 1.1}, "top_p", ["1.1", "from 0 to 1"]),
    ({"top_k": -2}, "top_k", ["-2"]),
    ({"top_k": 1.5}, "top_k", ["1.5", "integer from -1"]),
    ({"seed": 2**63}, "seed", ["64-bit"]),
    ({"seed": 10**40}, "seed", ["64-bit"]),
    ({"seed": "a"}, "seed", ['"a"', "integer"]),
    ({"stop": ["a"] * 17}, "stop", ["17", "at most 16"]),
    ({"stop": ""}, "stop", ["0 characters"]),
    ({"stop": ["a", ""]}, "stop[1]", ["0 characters"]),
    ({"stop": 3}, "stop", [": 3;", "string or list of strings"]),
    ({"stop_token_ids": [320]}, "stop_token_ids[0]", ["320", "0 to 319"]),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ["-1"]),
    ({"stream": "yes"}, "stream", ['"yes"', "boolean"]),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", [": 1;", "boolean"]),
    ({"ignore_eos": 1}, "ignore_eos", [": 1;", "boolean"]),
    ({"n": 0}, "n", ["0", "from 1 to 128"]),
    ({"n": 129}, "n", ["129"]),
    ({"n": True}, "n", ["true", "integer from 1 to 128"]),
    ({"logit_bias": {"320": 1}}, "logit_bias", ["320", "0..319"]),
    ({"logit_bias": {"9" * 40: 1}}, "logit_bias", ["token ids"]),
    ({"logit_bias": {"a": 1}}, "logit_bias", ["'a'", "token ids"]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ["'-1'", "token ids"]),
    ({"logit_bias": {"76": 100.5}}, "logit_bias", ["100.5"]),
    ({"logit_bias": {"76": "x"}}, "logit_bias[...]", ["a string", "number from -100 to 100"]),
    ({"logit_bias": [76]}, "logit_bias", ["a list", "object"]),
    ({"presence_penalty": 2.5}, "presence_penalty", ["2.5", "from -2 to 2"]),
    ({"frequency_penalty": -3}, "frequency_penalty", ["-3"]),
    ({"repetition_penalty": 0}, "repetition_penalty", ["from 0.01 to 100"]),
    ({"min_p": 1.01}, "min_p", ["1.01", "from 0 to 1"]),
    ({"min_tokens": -1}, "min_tokens", ["-1"]),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", ["6", "max_tokens"]),
    ({"prompt_logprobs": 21}, "prompt_logprobs", ["21", "from 0 to 20"]),
    ({"prompt_logprobs": -1}, "prompt_logprobs", ["-1"]),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output", ['"yes"', "boolean"]),
    ({"chat_template": "{{ 1 }}"}, "chat_template", ["not supported", "--chat-template FILE"]),
]

TEXT_FIELDS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"prompt": None}, "prompt", ["null", "string or list"]),
    ({"prompt": []}, "prompt", ["0 entries"]),
    ({"prompt": [[]]}, "prompt[0]", ["no tokens"]),
    ({"prompt": [1.5]}, "prompt[0]", ["1.5"]),
    ({"prompt": [1, "a"]}, "prompt[1]", ['"a"']),
    ({"prompt": [1, True]}, "prompt[1]", ["true"]),
    ({"prompt": [320]}, "prompt[0]", ["320", "0 to 319"]),
    ({"prompt": [-1]}, "prompt[0]", ["-1"]),
    ({"prompt": ["a", {}]}, "prompt[1]", ["an object"]),
    ({"prompt": [1] * 512}, "prompt", ["512 tokens", "at most 511"]),
    ({"echo": 1}, "echo", [": 1;", "boolean"]),
    ({"prompt": ["a"] * 100, "n": 100}, "n", ["100 for 100 prompts", "2048"]),
    ({"suffix": "x"}, "suffix", ["not supported"]),
    ({"best_of": 0}, "best_of", ["0", "from n, 1"]),
    ({"logprobs": 21}, "logprobs", ["21", "from 0 to 20"]),
    ({"logprobs": True}, "logprobs", ["true", "from 0 to 20"]),
]


@pytest.mark.parametrize(("fields", "param", "words"), [*CHAT_FIELDS, *COMMON_FIELDS])
def test_chat_fields(shared: RunningServer, fields: dict[str, Any], param: str, words: list[str]) -> None:
    check(shared.http.post(CHAT, json={"messages": YO, **fields}), 400, None, param, *words)


@pytest.mark.parametrize(("fields", "param", "words"), [*TEXT_FIELDS, *COMMON_FIELDS])
def test_completion_fields(shared: RunningServer, fields: dict[str, Any], param: str, words: list[str]) -> None:
    check(shared.http.post(TEXT, json={"prompt": "yo", **fields}), 400, None, param, *words)


def test_fields_that_ask_for_nothing_are_fine(shared: RunningServer) -> None:
    nothing = ("top_logprobs", "stop", "max_tokens", "temperature", "stream", "stream_options")
    neutral = {"n": 1, "tools": [], "tool_choice": "auto", "logprobs": False, "logit_bias": {}, "user": "u"}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}}
    body = {"messages": YO, **neutral, **dict.fromkeys(nothing)}
    response = shared.http.post(CHAT, json=body)
    assert response.status_code == 200 and "x-atlas-ignored-fields" not in response.headers


def test_missing_fields(shared: RunningServer) -> None:
    code = "missing_required_parameter"
    check(shared.http.post(CHAT, json={}), 400, code, "messages", "missing; accepted: list of ChatMessage")
    slip = {"model": "x", "mesages": [], "temprature": 1}
    check(shared.http.post(CHAT, json=slip), 400, code, "messages", "missing, but there is 'mesages'")
    flat = {"messages": YO, "tools": [{"type": "function", "name": "f"}]}
    check(shared.http.post(CHAT, json=flat), 400, code, "tools[0].function", "there is 'name'; accepted: object with")
    check(shared.http.post(TEXT, json={}), 400, "missing_required_parameter", "prompt", "missing")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_unknown_model(shared: RunningServer, path: str) -> None:
    body = {"model": "gpt-4", "messages": YO, "prompt": "yo"}
    check(
        shared.http.post(path, json=body),
        404,
        "model_not_found",
        "model",
        "gpt-4",
        "tiny",
        "--served-model-name NAME (or '*')",
    )


def test_one_line_of_3_megabytes(shared: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 3_000_000}]}
    response = shared.http.post(CHAT, json=body)
    check(response, 400, "context_length_exceeded", "messages", "tokens", "512")


def test_a_prompt_that_is_too_long_names_both_numbers(shared: RunningServer) -> None:
    response = shared.http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 600}]})
    check(response, 400, "context_length_exceeded", "messages", "604 tokens", "at most 511", "context is 512")


def test_a_body_that_is_too_large(shared: RunningServer) -> None:
    too_large = b" " * ((32 << 20) + 1)
    check(shared.http.post(CHAT, content=too_large, headers=JSON), 413, "request_too_large", None, "33554432")

    def chunks() -> Any:
        for _ in range(40):
            yield b" " * (1 << 20)

    check(shared.http.post(CHAT, content=chunks(), headers=JSON), 413, "request_too_large", None)


def test_a_declared_length_that_is_absurd(shared: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=2) as connection:
        headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {1 << 50}"
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\n{headers}\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types(shared: RunningServer, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    check(shared.http.post(CHAT, content=b"{}", headers=headers), 415, "unsupported_media_type", "content-type")
    assert shared.http.post(CHAT, json={"messages": YO}, headers={"content-type": "application/json; charset=utf-8"})


def test_unknown_paths_and_methods(shared: RunningServer) -> None:
    check(shared.http.get("/v1/nothing"), 404, "unknown_endpoint", None, "/v1/nothing")
    check(shared.http.get(CHAT), 405, "method_not_allowed", None, "GET")


def test_ignored_field_names_cannot_break_the_header(shared: RunningServer) -> None:
    body = {"messages": YO, "a\r\nx-evil: 1": 1, "ü" * 500: 2, **{f"f{i}": i for i in range(100)}}
    response = shared.http.post(CHAT, json=body)
    assert response.status_code == 200 and "x-evil" not in response.headers
    assert len(response.headers["x-atlas-ignored-fields"]) < 4000


def test_two_limits_that_differ_are_a_conflict(shared: RunningServer) -> None:
    body = {"messages": YO, "max_tokens": 4, "max_completion_tokens": 3}
    check(shared.http.post(CHAT, json=body), 400, "conflicting_parameters", "max_completion_tokens", "3", "4")
