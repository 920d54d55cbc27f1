"""What a chat template does not show of a conversation is told to who sent it, in the words of each API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.in_process import ANY, Server, make_model, template

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
NAMES = PLAIN.replace("{{ m.role }}", "{{ m.name or m.role }}")
IGNORED = "x-atlas-ignored-fields"

FUNCTION = {"name": "f", "arguments": "{}"}
CHAT = [
    {"role": "user", "content": "a", "name": "Ann"},
    {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "content": "b", "tool_call_id": "c", "name": "f"},
]
ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "function_call", "call_id": "c", **FUNCTION},
    {"type": "function_call_output", "call_id": "c", "output": "b"},
]
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}]},
]


def serve(folder: Path, shown: str, **settings: Any) -> Server:
    server = Server(make_model(folder / "model", chat_template=shown), **settings)
    server.say(ANY, [b"y"])
    return server


def ask(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return asyncio.run(server.post(path, **body))


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, "messages[].name, messages[].tool_calls"),
        ("/tokenize", {"messages": CHAT}, "messages[].name, messages[].tool_calls"),
        ("/v1/responses", {"input": ITEMS, "store": False}, "input[].function_call"),
        ("/v1/responses/input_tokens", {"input": ITEMS}, "input[].function_call"),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 5}, "messages[].content.tool_use"),
        ("/v1/messages/count_tokens", {"messages": TURNS}, "messages[].content.tool_use"),
    ],
)
def test_it_is_named(tmp_path: Path, path: str, body: dict[str, Any], told: str) -> None:
    answer = ask(serve(tmp_path / "plain", PLAIN), path, body)
    assert (answer.status_code, answer.headers.get(IGNORED)) == (200, told), answer.text
    answer = ask(serve(tmp_path / "strict", PLAIN, strict_fields=True), path, body)
    assert answer.status_code == 400 and "does not show" in answer.text
    answer = ask(serve(tmp_path / "calls", template()), path, body)  # one that shows calls, and no names
    assert answer.headers.get(IGNORED) == ("messages[].name" if "messages[].name" in told else None)


def test_names_that_are_shown(tmp_path: Path) -> None:
    server = serve(tmp_path, NAMES)
    answer = ask(server, "/v1/chat/completions", {"messages": CHAT[:1]})
    assert IGNORED not in answer.headers


def test_a_field_is_called_what_the_request_calls_it(tmp_path: Path) -> None:
    body = {"input": "a", "store": False, "reasoning": {"effort": "low"}}
    answer = ask(serve(tmp_path, PLAIN), "/v1/responses", body)
    assert answer.headers[IGNORED] == "reasoning.effort"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}), ("/v1/responses", {"input": "a"})],
)
@pytest.mark.parametrize(
    "extra",
    [
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_retention": "in_memory"},
        {"prompt_cache_options": {"mode": "implicit"}},
    ],
)
def test_both_of_openais_take_hints_that_ask_for_nothing(
    tmp_path: Path, path: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    answer = ask(serve(tmp_path, PLAIN), path, {**body, **extra})
    assert answer.status_code == 200 and IGNORED not in answer.headers, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "stream": True}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_what_stands_in_the_url_of_a_body(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    server = serve(tmp_path / "a", PLAIN)
    assert IGNORED not in ask(server, f"{path}?beta=true", body).headers
    assert ask(server, f"{path}?seed=1&beta=true", body).headers[IGNORED] == "?seed"
    assert ask(server, f"{path}?seed=1", {**body, "mood": 1}).headers[IGNORED] == "mood, ?seed"
    answer = ask(serve(tmp_path / "b", PLAIN, strict_fields=True), f"{path}?seed=1", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "?seed"
