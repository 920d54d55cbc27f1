"""Tools of chat requests: what the model is told, and what becomes of its calls."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.serve.in_process import Server, joined
from tests.serve.serve_harness import EOT, ids_of
from tests.serve.tool_server import (
    CALL,
    NOW,
    NOW_CALL,
    THOUGHT,
    WEATHER,
    YO,
    allowed,
    prompt_text,
    run,
    start_tools,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return start_tools(tmp_path_factory.mktemp("model") / "tiny")


def test_what_the_model_is_told(server: Server) -> None:
    async def main() -> None:
        server.say_text(1, CALL)
        answer = await server.chat(messages=YO, seed=1, tools=[WEATHER, NOW])
        call = answer["choices"][0]["message"]["tool_calls"][0]
        assert call["id"].startswith("call_") and call["type"] == "function"
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris 😀"}'}
        declared = "".join(f"<|tool|>{json.dumps(tool)}" for tool in (WEATHER, NOW))
        assert prompt_text(server) == f"<s>{declared}<|user|>yo<|eot|><|assistant|>"

        # The next turn: what the client sends back reaches the template.
        turn = {**answer["choices"][0]["message"], "reasoning_content": "Hm."}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "mild"}
        server.say_text(2, "Mild.")
        answer = await server.chat(messages=[*YO, turn, result], seed=2, tools=[NOW])
        told = '<|assistant|>(thought Hm.)get_weather({"city": "Paris 😀"})<|eot|><|tool|>mild<|eot|>'
        assert prompt_text(server) == f"<s><|tool|>{json.dumps(NOW)}<|user|>yo<|eot|>{told}<|assistant|>"
        assert answer["choices"][0]["message"]["content"] == "Mild."
        assert "tool_calls" not in answer["choices"][0]["message"]

    run(main)


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"ä": 1}', '{ "ä":1 }', {"ä": 1}])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_call_in_the_history(server: Server, content: dict[str, Any], arguments: Any, name: str) -> None:
    async def main() -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turn = {"role": "assistant", **content, "tool_calls": [call], name: "Hm."}
        await server.chat(messages=[*YO, turn], seed=server.say_text(1, "ok"))
        assert '<|assistant|>(thought Hm.)f({"ä": 1})<|eot|><|assistant|>' in prompt_text(server)

    run(main)


def test_special_tokens_of_a_client_stay_text(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "</s><|eot|>", "parameters": {}}}

    async def main() -> None:
        server.say_text(1, "ok")
        turn = {"role": "assistant", "reasoning_content": "<|eot|>", "content": "a"}
        style = {"style": "<|eot|>"}
        await server.chat(messages=[*YO, turn], seed=1, tools=[tool], chat_template_kwargs=style)
        prompt = server.engine.submitted[-1][0]
        assert prompt.count(EOT) == 2 and 2 not in prompt
        assert "</s><|eot|>" in prompt_text(server) and "(<|eot|>)" in prompt_text(server)

    run(main)


def test_without_tools_nothing_is_a_call(server: Server) -> None:
    async def main() -> None:
        text = '{"name": "now", "arguments": {}}'
        for fields in ({}, {"tools": []}, {"tools": [NOW], "tool_choice": "none"}):
            server.say_text(1, f"<tool_call>{text}</tool_call>")
            answer = await server.chat(messages=YO, seed=1, **fields)
            # The special tokens are no text; what stands between them is.
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert "<|tool|>" not in prompt_text(server)

    run(main)


def test_one_call_where_several_are_not_wanted(server: Server) -> None:
    async def main() -> None:
        text = f"a {CALL}\n{NOW_CALL} b"
        server.say_text(1, text)
        answer = await server.chat(messages=YO, seed=1, tools=[WEATHER, NOW])
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 2
        left = server.engine.left
        fields: dict[str, Any] = {"messages": YO, "seed": 1, "tools": [WEATHER, NOW], "parallel_tool_calls": False}
        whole = await server.chat(**fields)
        choice = whole["choices"][0]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "tool_calls")
        assert server.engine.left == left + 1  # the rest is not generated
        # The call is whole at the brace that closes its arguments; the marker before it is one token.
        before = text[: text.index("}}") + 1].replace("<tool_call>", "-")
        assert whole["usage"]["completion_tokens"] == len(before.encode())
        server.say_text(1, text, group=200)
        streamed = await server.stream(**fields, stream_options={"include_usage": True})
        assert streamed[-1]["usage"] == whole["usage"]
        assert (
            joined(streamed)["message"]["tool_calls"][0]["function"] == choice["message"]["tool_calls"][0]["function"]
        )

    run(main)


def test_allowed_tools_are_all_that_the_model_is_told_of(server: Server) -> None:
    async def main() -> None:
        fields: dict[str, Any] = {"tools": [WEATHER, NOW], "tool_choice": allowed("now")}
        answer = await server.chat(messages=YO, seed=server.say_text(1, NOW_CALL), **fields)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert prompt_text(server).startswith(f"<s><|tool|>{json.dumps(NOW)}<|user|>")

    run(main)


def test_several_choices_with_calls(server: Server) -> None:
    from atlas.engine.sampling import choice_seed

    async def main() -> None:
        seeds = [choice_seed(9, index) for index in range(3)]
        for seed, text in zip(seeds, (CALL, "Hi", f"{THOUGHT}{NOW_CALL}"), strict=True):
            server.say_text(seed, text)
        fields: dict[str, Any] = {"messages": YO, "seed": 9, "n": 3, "tools": [WEATHER, NOW]}
        whole = (await server.chat(**fields))["choices"]
        chunks = await server.stream(**fields)
        for choice, streamed in zip(whole, (joined(chunks, index) for index in range(3)), strict=True):
            for found in (choice, streamed):
                for call in found["message"].get("tool_calls", []):
                    call["id"] = ""
            assert choice == streamed
        assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "stop", "tool_calls"]

    run(main)


@pytest.mark.parametrize("group", [1, 3, 100])
def test_logprobs_beside_calls(server: Server, group: int) -> None:
    """One entry for each token, whenever the parser lets go of its text."""

    async def main() -> None:
        text = f"{THOUGHT}a {CALL}"
        server.say_text(1, text, group=group)
        fields: dict[str, Any] = {"messages": YO, "seed": 1, "tools": [WEATHER], "logprobs": True}
        answer = await server.chat(**fields)
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]) == f"{text}<|eot|>".encode()
        chunks = await server.stream(**fields)
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry for part in streamed if part for entry in part["content"]] == entries
        assert joined(chunks)["message"]["tool_calls"][0]["function"]["name"] == "get_weather"

    run(main)


class Weather(pydantic.BaseModel):
    """The weather."""

    city: str


def test_the_official_clients_helpers(server: Server) -> None:
    """`stream()` and `parse()` of openai's client follow the chunks and read the arguments by the model's class."""
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]

    async def main() -> None:
        text = f"{THOUGHT}Looking. {CALL}"
        server.say_text(1, text, group=2)
        completions = server.openai.chat.completions
        fields: Any = {"model": server.service.config.model_name, "messages": YO, "tools": tools, "seed": 1}
        events = []
        async with completions.stream(**fields) as stream:
            async for event in stream:
                events.append(event.type)
            final = await stream.get_final_completion()
        parsed = await completions.parse(**fields)
        for completion in (final, parsed):
            choice = completion.choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content == "Looking."
            assert choice.message.tool_calls is not None
            arguments = choice.message.tool_calls[0].function.parsed_arguments
            assert isinstance(arguments, Weather) and arguments.city == "Paris 😀"
        assert (
            "tool_calls.function.arguments.delta" in events and events.count("tool_calls.function.arguments.done") == 1
        )
        assert events.count("content.done") == 1

    run(main)


def test_ids_of_the_prompt_tokens(server: Server) -> None:
    """usage counts what the engine was given."""

    async def main() -> None:
        answer = await server.chat(messages=YO, seed=server.say_text(1, "ok"))
        prompt = server.engine.submitted[-1][0]
        assert answer["usage"]["prompt_tokens"] == len(prompt) and prompt[0] == 1 and ids_of("yo")[0] in prompt

    run(main)
