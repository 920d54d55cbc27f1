"""`strict` of a tool: calls that the model makes by itself keep to its schema, too, or it is refused with the path."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.serve.in_process import Server, make_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    running = Server(make_model(tmp_path_factory.mktemp("strict") / "model"), tool_parser="hermes")
    running.say_text(1, "answer")
    return running


def ask(server: Server, *functions: dict[str, Any], **body: Any) -> Any:
    tools = [{"type": "function", "function": function} for function in functions]
    messages = [{"role": "user", "content": "hi"}]
    return asyncio.run(server.post(messages=messages, tools=tools, seed=1, **body))


def tool(name: str = "get", strict: bool | None = None, **schema: Any) -> dict[str, Any]:
    return {"name": name, "strict": strict, "parameters": {**SCHEMA, **schema}}


def test_only_a_strict_tool_is_held_in_auto(server: Server) -> None:
    def grammar(*functions: dict[str, Any], **body: Any) -> Any:
        response = ask(server, *functions, **body)
        assert response.status_code == 200, response.text
        return server.engine.submitted[-1][1].grammar

    assert grammar(tool()) is None and grammar(tool(strict=False)) is None
    held = grammar(tool(), tool("put", strict=True))
    assert held.syntax == "lark" and '"lenient": true' in held.text and '"lenient": false' in held.text
    assert "(?s:.*)" in held.text, "any text may be the answer"
    assert "(?s:.*)" not in grammar(tool(strict=True), tool_choice="required").text
    beside = grammar(tool(strict=True), response_format={"type": "json_object"}).text
    assert "(?s:.*)" not in beside, "the other answer is JSON"
    assert grammar(tool(strict=True), tool_choice="none") is None


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_cannot_be_held_is_refused_of_a_strict_tool(server: Server, choice: str) -> None:
    """And left out of another's schema, whose arguments are the model's best."""
    odd = {"properties": {"city": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
    error = ask(server, tool("a"), tool("get", True, **odd), tool_choice=choice).json()["error"]
    assert error["param"] == "tools[1].function.parameters.properties.city.uniqueItems"
    assert error["code"] == "invalid_grammar"
    assert ask(server, tool("a"), tool("get", **odd), tool_choice=choice).status_code == 200


def test_a_schema_that_is_none_is_named_by_its_tool(server: Server) -> None:
    wrong = tool("put", properties={"city": {"type": "string", "pattern": "("}})
    error = ask(server, tool("get", True), wrong).json()["error"]
    assert error["param"] == "tools[1].function.parameters.properties.city.pattern"


def test_what_a_notation_cannot_hold_is_named_by_its_tool(tmp_path: Path) -> None:
    server = Server(make_model(tmp_path / "model"), tool_parser="qwen3_coder")
    server.say_text(1, "answer")
    odd = {"properties": {"city": {"type": "string", "format": "uri"}}}
    error = ask(server, tool("a"), tool("get", True, **odd)).json()["error"]
    assert (error["param"], error["code"]) == ("tools[1].function.parameters", "invalid_grammar")
    assert "format" in error["message"]
    assert ask(server, tool("get", **odd), tool_choice="required").status_code == 200
