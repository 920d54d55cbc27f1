"""Calls that have to be made, by a model of random weights: it would never write one by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from atlas.engine.sampling import Grammar
from atlas.serve import answer_grammar
from atlas.serve.errors import ApiError
from atlas.serve.grammars import Wanted
from tests import tiny_model
from tests.serve.in_process import Server, make_model
from tests.serve.real_server import MODEL, RealServer
from tests.serve.serve_harness import eventually

YO: list[Any] = [{"role": "user", "content": "yo"}]
BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["train", "plane"]},
        "first": {"type": "boolean"},
        "when": {
            "type": "object",
            "properties": {"day": {"enum": [1, 2]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "when"],
}
SCHEMAS: dict[str, dict[str, Any]] = {"book": BOOK, "now": {}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "book", "parameters": BOOK}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("forced")
    special = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    model = tiny_model.write(make_model(folder / MODEL, special=special), eos_token_id=2, max_position_embeddings=2048)
    flags = ("--backend", "cpu", "--quant", "f32", "--tool-parser", "hermes", "--reasoning-parser", "think")
    started = RealServer(folder, model, *flags)
    try:
        eventually(started.healthy, 60)
        yield started
    finally:
        started.process.kill()
        started.process.wait(10)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [
        ("required", True, {"book", "now"}),
        ("required", False, {"book", "now"}),
        ({"type": "function", "function": {"name": "book"}}, True, {"book"}),
        ({"type": "function", "function": {"name": "now"}}, True, {"now"}),
    ],
)
def test_a_call_is_made(server: RealServer, choice: Any, parallel: bool, names: set[str], streamed: bool) -> None:
    completions = server.client.chat.completions
    for seed in range(3):
        fields: dict[str, Any] = {"model": MODEL, "messages": YO, "tools": TOOLS, "tool_choice": choice, "seed": seed}
        fields |= {"parallel_tool_calls": parallel, "max_tokens": 600}
        if streamed:
            try:
                with completions.stream(**fields) as stream:
                    stream.until_done()
                    answer: Any = stream.get_final_completion().choices[0]
            except openai.LengthFinishReasonError as error:
                answer = error.completion.choices[0]
        else:
            answer = completions.create(**fields).choices[0]
        calls = answer.message.tool_calls
        assert calls
        single = not parallel or isinstance(choice, dict)
        if single:  # several may be cut by max_tokens, in the name of one
            assert len(calls) == 1 and answer.finish_reason == "tool_calls" and not answer.message.content
        for call in calls if single else calls[:-1]:
            assert call.function.name in names
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_call_after_reasoning(server: RealServer) -> None:
    """The grammar is for what comes after it, and a budget ends it."""
    answer = server.client.chat.completions.create(
        model=MODEL,
        messages=YO,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "now"}},
        seed=1,
        extra_body={"enable_thinking": True, "thinking_budget": 5},
    )
    message, usage = answer.choices[0].message, answer.usage
    assert message.tool_calls and message.tool_calls[0].function.arguments == "{}"
    assert usage is not None and usage.completion_tokens_details is not None
    assert 1 <= (usage.completion_tokens_details.reasoning_tokens or 0) <= 5 + 1


def test_an_answer_in_a_schema_beside_tools(server: RealServer) -> None:
    """It is in the schema, or a call: the model may choose."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for seed in range(4):
        answer = server.client.chat.completions.create(
            model=MODEL,
            messages=YO,
            tools=TOOLS,
            response_format=form,
            seed=seed,
            max_tokens=600,
            parallel_tool_calls=False,
            extra_body={"enable_thinking": False},
        )
        message = answer.choices[0].message
        if message.tool_calls:
            assert answer.choices[0].finish_reason == "tool_calls" and not message.content
        else:
            jsonschema.validate(json.loads(message.content or ""), schema)


def test_wrong_schemas_are_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    asked = Server(model, tool_parser="hermes", reasoning_parser="none")
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "strange"}}}}}

    async def main() -> None:
        response = await asked.post(messages=YO, tools=[*TOOLS, wrong], tool_choice="required")
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "invalid_grammar", error
        assert error["param"].startswith("tools[2].function.parameters"), error
        lark = {"type": "grammar", "grammar": 'start: "a"'}
        response = await asked.post(messages=YO, tools=TOOLS, response_format=lark)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "conflicting_parameters"), error
        # Nothing is compiled for tools that the model may leave alone.
        asked.say_text(1, "ok")
        assert (await asked.chat(messages=YO, tools=[wrong], seed=1))["choices"][0]["message"]["content"] == "ok"

    asyncio.run(main())


def test_the_tool_at_fault_is_not_looked_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look may take seconds, for which others wait."""
    monkeypatch.setattr(answer_grammar, "BLAME_SECONDS", 0.2)
    server = Server(make_model(tmp_path / "model"), tool_parser="hermes")
    looked = []

    async def check(wanted: Wanted) -> Grammar:
        looked.append(wanted.where)
        if wanted.where == "tools":
            raise ApiError(400, "grammar_too_complex", "tools: too expensive", "tools")
        await asyncio.sleep(0.1)
        return wanted.grammar

    monkeypatch.setattr(server.frontend.grammars, "check", check)
    tools = [{"type": "function", "function": {"name": f"f{place}"}} for place in range(100)]
    answer = asyncio.run(server.post(messages=YO, tools=tools, tool_choice="required"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert 1 < len(looked) < 10


def test_openai_errors(server: RealServer) -> None:
    with pytest.raises(openai.BadRequestError, match="without tools"):
        server.client.chat.completions.create(model=MODEL, messages=YO, tool_choice="required")
