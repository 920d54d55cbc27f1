"""Requests with tools, calls and reasoning that are wrong, or that a model cannot answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serve.in_process import Server, make_model
from tests.serve.tool_server import (
    NOW,
    YO,
    allowed,
    run,
    start_tools,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return start_tools(tmp_path_factory.mktemp("model") / "tiny")


WRONG: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"tools": [NOW, NOW]}, "tools[1].function.name", ["'now'", "second time"]),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", ["''", "letters"]),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ["'a b'"]),
    ({"tools": [{"type": "function", "function": {"name": "a" * 257}}]}, "tools[0].function.name", ["256"]),
    ({"tools": [{"type": "function"}]}, "tools[0].function", ["missing"]),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", ["web_search"]),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", ["custom"]),
    ({"tools": {}}, "tools", ["an object", "list"]),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
        ["object"],
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters.type",
        ["array", "object"],
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
        "tools[0].function.parameters.properties",
        ["list", "object"],
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": "a"}}}]},
        "tools[0].function.parameters.required",
        ["list"],
    ),
    ({"tools": [NOW] * 1025}, "tools", ["1025", "1024"]),
    ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice", ["maybe"]),
    (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
        ["'g'", "now"],
    ),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name", ["'g'"]),
    ({"tool_choice": "required"}, "tool_choice", ["without tools"]),
    (
        {"tools": [NOW], "tool_choice": allowed("now", "g")},
        "tool_choice.allowed_tools.tools[1].function.name",
        ["'g'", "now"],
    ),
    ({"tools": [NOW], "tool_choice": allowed()}, "tool_choice.allowed_tools.tools", ["empty"]),
    ({"tools": [NOW], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type", ["custom"]),
    ({"tools": [NOW], "parallel_tool_calls": "no"}, "parallel_tool_calls", ["bool"]),
    ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort", ["enable_thinking"]),
    ({"enable_thinking": False, "thinking": {"type": "enabled"}}, "thinking.type", ["enable_thinking is False"]),
    (
        {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs.enable_thinking",
        ["enable_thinking"],
    ),
    ({"thinking_budget": -1}, "thinking_budget", ["-1", "at least 0"]),
    ({"thinking_budget": 3, "max_thinking_tokens": 4}, "max_thinking_tokens", ["4", "thinking_budget is 3"]),
    ({"reasoning_effort": "much"}, "reasoning_effort", ["much"]),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", ["the server sets"]),
    ({"functions": [{"name": "f"}]}, "functions", ["not supported"]),
    ({"function_call": {"name": "f"}}, "function_call", ["not supported"]),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG)
def test_wrong_requests(server: Server, fields: dict[str, Any], param: str, words: list[str]) -> None:
    async def main() -> None:
        before = len(server.engine.submitted)
        response = await server.post(messages=YO, seed=server.say_text(1, "ok"), **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param and error["message"].startswith(param), error
        assert error["type"] == "invalid_request_error" and error["code"]
        for word in words:
            assert word in error["message"]
        assert len(server.engine.submitted) == before

    run(main)


def test_deeply_nested_arguments_and_schemas(server: Server) -> None:
    nested = '{"properties": {"a": ' * 450 + "1" + "}}" * 450
    function = f'"type": "function", "function": {{"name": "f", "parameters": {nested}, "arguments": {nested}}}'
    yo = '"messages": [{"role": "user", "content": "yo"}], "seed": 1'

    async def main() -> None:
        server.say_text(1, "ok")
        for body in (
            f'{{{yo}, "tools": [{{{function}}}]}}',
            f'{{"messages": [{{"role": "assistant", "tool_calls": [{{{function}}}]}}]}}',
            f'{{{yo}, "chat_template_kwargs": {{"style": {nested}}}}}',
        ):
            headers = {"content-type": "application/json"}
            response = await server.http.post("/v1/chat/completions", content=body, headers=headers)
            assert response.status_code == 400 and "nested too deeply" in response.text, response.text
        assert (await server.chat(messages=YO, seed=1))["choices"][0]["message"]["content"] == "ok"

    run(main)


def test_models_that_cannot(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    silent = Server(make_model(tmp_path / "plain", chat_template=plain))
    formatless = Server(make_model(tmp_path / "tools"), tool_parser="none", reasoning_parser="none")
    thinker = Server(make_model(tmp_path / "thinks", chat_template=plain + "<think>"), reasoning_parser="think")

    async def refused(server: Server, code: str, *words: str, **fields: Any) -> None:
        response = await server.post(messages=YO, **fields)
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == code, error
        for word in words:
            assert word in error["message"]

    async def main() -> None:
        await refused(silent, "no_tool_template", "no place for tools", "--chat-template", "docs/tools.md", tools=[NOW])
        await refused(formatless, "unsupported_parameter", "--tool-parser", tools=[NOW])
        await refused(silent, "invalid_value", "enable_thinking", "never reason", enable_thinking=True)
        await refused(silent, "unsupported_parameter", "thinking_budget", thinking_budget=3)
        await refused(thinker, "invalid_value", "always reason", "switch", enable_thinking=False)
        for server, fields in [
            (silent, {"enable_thinking": False, "reasoning_effort": "none", "tools": [], "tool_choice": "auto"}),
            (thinker, {"enable_thinking": True, "reasoning_effort": "high"}),
        ]:
            server.say_text(1, "a</think>b")
            message = (await server.chat(messages=YO, seed=1, **fields))["choices"][0]["message"]
            assert message["content"] == ("b" if server is thinker else "a</think>b")

    run(main)


def test_what_a_template_does_not_read_is_reported(server: Server) -> None:
    async def main() -> None:
        fields = {"mood": 1, "chat_template_kwargs": {"colour": "red", "enable_thinking": False}}
        response = await server.post(messages=YO, seed=server.say_text(1, "ok"), **fields)
        assert response.headers["x-atlas-ignored-fields"] == "mood, chat_template_kwargs.colour"

    run(main)
