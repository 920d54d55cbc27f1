"""Tools of /v1/responses that are no plain function: those of namespaces, and a search that agent tools offer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from tests.serve.in_process import Server, make_model
from tests.serve.responses_server import TRANSPARENT

CLOSE: Any = {"type": "function", "name": "close", "description": "Close it.", "parameters": {"type": "object"}}
AGENTS: Any = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [CLOSE]}
SEARCH: Any = {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": ["a"]}}
CALL = '<tool_call>{"name": "agents.close", "arguments": {"id": 1}}</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    special = ["<tool_call>", "</tool_call>"]
    model = make_model(tmp_path_factory.mktemp("model") / "tiny", special=special, chat_template=TRANSPARENT)
    server = Server(model, tool_parser="hermes")
    server.say_text(1, CALL)
    server.say_text(2, "done")
    return server


def prompt(server: Server) -> list[Any]:
    """Messages and tools as the template had them last."""
    text = server.frontend.tokenizer.show(frozenset()).decode(server.engine.submitted[-1][0])
    messages, end = json.JSONDecoder().raw_decode(text)
    return [messages, json.loads(text[end:]) if text[end:] else None]


def test_a_call_of_a_namespace(server: Server) -> None:
    """The model has one name, the client two, in one piece, as a stream, and when it goes on."""
    tools = [AGENTS, {**CLOSE, "description": "Another."}]

    async def main() -> None:
        ask: Any = server.openai.responses.create
        answer = await ask(model="tiny", input="x", tools=tools, extra_body={"seed": 1})
        told = {tool["function"]["name"]: tool["function"]["description"] for tool in prompt(server)[1]}
        assert told == {"agents.close": "Sub-agents.\n\nClose it.", "close": "Another."}
        (call,) = answer.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.namespace, call.name, call.arguments) == ("agents", "close", '{"id": 1}')
        assert answer.tools[0].type == "namespace" and answer.tools[0].tools[0].name == "close"

        events = [e async for e in await ask(model="tiny", input="x", tools=tools, stream=True, extra_body={"seed": 1})]
        items = [event.item for event in events if event.type.startswith("response.output_item")]
        assert [(item.namespace, item.name) for item in items] == [("agents", "close")] * 2
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.name == "close"

        result = {"type": "function_call_output", "call_id": call.call_id, "output": "closed"}
        for given in ({"input": [result], "previous_response_id": answer.id}, {"input": [call.to_dict(), result]}):
            await ask(model="tiny", tools=tools, extra_body={"seed": 2}, **given)
            assert prompt(server)[0][-2]["tool_calls"][0]["function"]["name"] == "agents.close"

    asyncio.run(main())


def test_a_search_beside_functions_is_told_of_and_left_out(server: Server) -> None:
    async def main() -> None:
        raw = server.openai.responses.with_raw_response.create
        body = {"seed": 2}
        answer = await raw(model="tiny", input="x", tools=[SEARCH, CLOSE], extra_body=body)  # type: ignore[call-overload]
        assert answer.headers["x-atlas-ignored-fields"] == "tools[].type"
        assert [tool["function"]["name"] for tool in prompt(server)[1]] == ["close"]
        assert [tool.type for tool in answer.parse().tools] == ["function"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [SEARCH]}, "tools[0].type"),
        ({"tools": [CLOSE, {"type": "file_search"}]}, "tools[1].type"),
        ({"tools": [CLOSE, SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{**AGENTS, "tools": [CLOSE, {"type": "custom", "name": "x"}]}]}, "tools[0].tools[1].type"),
        ({"tools": [SEARCH, {**AGENTS, "tools": [{**CLOSE, "name": "a b"}]}]}, "tools[1].tools[0].name"),
        ({"tools": [AGENTS, AGENTS]}, "tools[1].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        ({"tools": [AGENTS], "tool_choice": {"type": "function", "name": "close"}}, "tool_choice.name"),
    ],
)
def test_what_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    async def main() -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await server.openai.responses.create(model="tiny", input="x", **fields)
        assert caught.value.param == param

    asyncio.run(main())


def test_strict_fields(tmp_path: Path) -> None:
    server = Server(make_model(tmp_path / "tiny", chat_template=TRANSPARENT), tool_parser="hermes", strict_fields=True)

    async def main() -> None:
        with pytest.raises(openai.BadRequestError, match=r"tools\[1\].type: this server has no web_search"):
            await server.openai.responses.create(model="tiny", input="x", tools=[CLOSE, SEARCH])

    asyncio.run(main())
