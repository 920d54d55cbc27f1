"""Tools and reasoning of chat requests: what the model is told, what is refused, and how answers end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from atlas.serve import http
from tests.serve.in_process import Server, joined, make_model
from tests.serve.serve_harness import EOT, ids_of

YO: list[dict[str, Any]] = [{"role": "user", "content": "yo"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris 😀"}}\n</tool_call>'
NOW_CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
THOUGHT = "<think>\nHm, END.\n</think>\n\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    return make_model(tmp_path_factory.mktemp("model") / "tiny", special=special)


@pytest.fixture(scope="module")
def server(model: Path) -> Server:
    return Server(model, tool_parser="hermes", reasoning_parser="think")


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def prompt_text(server: Server) -> str:
    """What the model was told last, special tokens as they are written."""
    ids = server.engine.submitted[-1][0]
    text: str = server.frontend.tokenizer.show(frozenset()).decode(ids, skip_special_tokens=False)
    return text


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


def test_how_answers_end(server: Server) -> None:
    """stop, length, tool_calls: each only where it is true."""

    async def main() -> None:
        tokens = len(CALL.encode()) - len("<tool_call>") - len("</tool_call>") + 2
        for text, limit, reason, whole in [
            (CALL, None, "tool_calls", True),
            (CALL, tokens + 1, "tool_calls", True),
            (CALL, tokens, "length", True),  # all of it is there, but the model had not ended
            (CALL, tokens - 4, "length", False),
            (CALL, 8, "length", None),
            (CALL.replace('😀"}}\n</tool_call>', ""), None, "stop", False),
            ("Hi", None, "stop", None),
            ("Hi", 2, "length", None),
            (NOW_CALL + " END", None, "tool_calls", True),
        ]:
            server.say_text(1, text)
            fields = {"messages": YO, "seed": 1, "tools": [WEATHER, NOW], "max_tokens": limit, "stop": "END"}
            choice = (await server.chat(**fields))["choices"][0]
            streamed = joined(await server.stream(**fields))
            calls = choice["message"].get("tool_calls")
            assert choice["finish_reason"] == streamed["finish_reason"] == reason, (text, limit)
            assert (calls is not None) == (whole is not None)
            for call, other in zip(calls or [], streamed["message"].get("tool_calls", []), strict=True):
                assert call["function"] == other["function"]
                if whole:
                    json.loads(call["function"]["arguments"])
                else:  # nothing is made up: no client can take it for a call to be made
                    with pytest.raises(ValueError):
                        json.loads(call["function"]["arguments"])

    run(main)


@pytest.mark.parametrize("group", [1, 3, 100])
def test_stop_strings_are_of_the_content(server: Server, group: int) -> None:
    """One that the model thinks of, or writes into an argument, ends nothing."""

    async def main() -> None:
        for text, stop, message, reason in [
            (f"{THOUGHT}abENDcd", "END", {"content": "ab", "reasoning_content": "Hm, END."}, "stop"),
            (f"{THOUGHT}abcd", "\n\n", {"content": "abcd", "reasoning_content": "Hm, END."}, "stop"),
            (f"{THOUGHT}ab\n\ncd", "\n\n", {"content": "ab", "reasoning_content": "Hm, END."}, "stop"),
            (f"a {CALL}", "Paris", {"content": "a", "calls": 1}, "tool_calls"),
            (f"aEN{CALL}D", "END", {"content": "aEND", "calls": 1}, "tool_calls"),
            (f"aEN{CALL}", "END", {"content": "aEN", "calls": 1}, "tool_calls"),
            (f"{CALL}aEND{NOW_CALL}", "END", {"content": "a", "calls": 1}, "tool_calls"),
            (f"{THOUGHT}aEN", ["ENDX", "N"], {"content": "aE", "reasoning_content": "Hm, END."}, "stop"),
        ]:
            server.say_text(1, text, group=group)
            fields = {"messages": YO, "seed": 1, "tools": [WEATHER, NOW], "stop": stop}
            whole = await server.chat(**fields)
            chunks = await server.stream(**fields, stream_options={"include_usage": True})
            for choice in (whole["choices"][0], joined(chunks)):
                found = choice["message"]
                calls = len(found.pop("tool_calls", []))
                expected = {"role": "assistant", "refusal": None, "calls": 0, **message}
                assert {**found, "calls": calls} == expected, (text, stop)
                assert choice["finish_reason"] == reason, (text, stop)
            assert whole["usage"] == chunks[-1]["usage"]

    run(main)


def test_a_stop_string_that_stays(server: Server) -> None:
    async def main() -> None:
        server.say_text(1, f"{THOUGHT}abENDcd")
        fields: dict[str, Any] = {"messages": YO, "seed": 1, "stop": "END", "include_stop_str_in_output": True}
        assert (await server.chat(**fields))["choices"][0]["message"]["content"] == "abEND"
        assert joined(await server.stream(**fields))["message"]["content"] == "abEND"

    run(main)


def test_reasoning_tokens_are_counted(server: Server) -> None:
    async def main() -> None:
        thought = 2 + len("\nHm, END.\n")
        for text, fields, expected in [
            (f"{THOUGHT}ab", {}, thought),
            ("Hm.</think>ab", {"enable_thinking": True}, 4),
            ("Hm.", {"enable_thinking": True}, 3),
            ("ab", {"enable_thinking": False}, 0),
            ("ab", {}, 0),
        ]:
            for group in (1, 4):
                server.say_text(1, text, group=group)
                body = {"messages": YO, "seed": 1, **fields}
                usage = (await server.chat(**body))["usage"]
                assert usage["completion_tokens_details"]["reasoning_tokens"] == expected
                assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
                assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
                options = {"include_usage": True, "continuous_usage_stats": True}
                chunks = await server.stream(**body, stream_options=options)
                assert chunks[-1]["usage"] == usage == chunks[-2]["usage"]
                counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
                assert counts == sorted(counts) and counts[0] == 0

    run(main)


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({}, "<|assistant|>"),
        ({"enable_thinking": True}, "<think>"),
        ({"enable_thinking": False}, "</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": True}, "<think>"),
        ({"reasoning_effort": "none"}, "</think>\n\n"),
        ({"reasoning_effort": "low"}, "<think>"),
        ({"reasoning": {"effort": "high"}}, "<think>"),
        ({"reasoning": {"enabled": False}}, "</think>\n\n"),
        ({"thinking": {"type": "disabled"}}, "</think>\n\n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, "<think>"),
    ],
)
def test_the_switch_of_reasoning(server: Server, fields: dict[str, Any], ends: str) -> None:
    async def main() -> None:
        inside = ends == "<think>"
        server.say_text(1, "Hm.</think>ab" if inside else "ab")
        message = (await server.chat(messages=YO, seed=1, **fields))["choices"][0]["message"]
        assert prompt_text(server).endswith(ends)
        assert message["content"] == "ab" and message.get("reasoning_content") == ("Hm." if inside else None)

    run(main)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 5},
        {"thinking_token_budget": 5},
        {"max_thinking_tokens": 5},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"reasoning": {"max_tokens": 5}},
        {"thinking_budget": 5, "max_thinking_tokens": 5},
    ],
)
@pytest.mark.parametrize("inside", [True, None])
def test_a_budget_of_reasoning(server: Server, fields: dict[str, Any], inside: bool | None) -> None:
    async def main() -> None:
        server.say_text(1, "ab")
        await server.chat(messages=YO, seed=1, **fields, enable_thinking=inside)
        thinking = server.engine.submitted[-1][1].thinking
        begin, end = (server.frontend.tokenizer.encode(m, add_special_tokens=False) for m in ("<think>", "</think>"))
        assert len(end) == 1 and thinking is not None
        inside_now = bool(inside) or "thinking" in fields
        assert (thinking.end, thinking.inside, thinking.budget) == (tuple(end), inside_now, 5)
        assert thinking.begin == tuple(begin)

    run(main)


def _allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_all_that_the_model_is_told_of(server: Server) -> None:
    async def main() -> None:
        fields: dict[str, Any] = {"tools": [WEATHER, NOW], "tool_choice": _allowed("now")}
        answer = await server.chat(messages=YO, seed=server.say_text(1, NOW_CALL), **fields)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert prompt_text(server).startswith(f"<s><|tool|>{json.dumps(NOW)}<|user|>")

    run(main)


WRONG: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"tools": [NOW, NOW]}, "tools[1].function.name", ["'now'", "second time"]),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", ["''", "letters"]),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ["'a b'"]),
    ({"tools": [{"type": "function", "function": {"name": "a" * 257}}]}, "tools[0].function.name", ["256"]),
    ({"tools": [{"type": "function"}]}, "tools[0].function", ["missing"]),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", ["web_search"]),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", ["custom"]),
    ({"tools": {}}, "tools", ["array"]),
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
        {"tools": [NOW], "tool_choice": _allowed("now", "g")},
        "tool_choice.allowed_tools.tools[1].function.name",
        ["'g'", "now"],
    ),
    ({"tools": [NOW], "tool_choice": _allowed()}, "tool_choice.allowed_tools.tools", ["empty"]),
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


def test_a_stream_that_has_nothing_to_tell_stays_alive(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument is told when it is whole; comments keep the connection from being taken for a dead one."""
    monkeypatch.setattr(http, "PING_SECONDS", 0.02)
    monkeypatch.setattr(server.engine, "delay", 0.1)

    async def main() -> None:
        fields: dict[str, Any] = {"messages": YO, "seed": server.say_text(1, CALL, group=20), "tools": [WEATHER]}
        response = await server.post(stream=True, **fields)
        lines = [line for line in response.text.splitlines() if line]
        assert {line for line in lines if not line.startswith("data: ")} == {": still at work"}
        fields["model"] = server.service.config.model_name
        async with server.openai.chat.completions.stream(**fields) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.tool_calls

    run(main)


def test_ids_of_the_prompt_tokens(server: Server) -> None:
    """usage counts what the engine was given."""

    async def main() -> None:
        answer = await server.chat(messages=YO, seed=server.say_text(1, "ok"))
        prompt = server.engine.submitted[-1][0]
        assert answer["usage"]["prompt_tokens"] == len(prompt) and prompt[0] == 1 and ids_of("yo")[0] in prompt

    run(main)
