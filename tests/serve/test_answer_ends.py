"""How chat answers with reasoning and calls end: stop strings, budgets, reasons, and the tokens that are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atlas.serve import http
from tests.serve.in_process import Server, joined
from tests.serve.tool_server import (
    CALL,
    NOW,
    NOW_CALL,
    THOUGHT,
    WEATHER,
    YO,
    prompt_text,
    run,
    start_tools,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return start_tools(tmp_path_factory.mktemp("model") / "tiny")


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
