"""Tool calls and reasoning over HTTP: every answer streamed and in one piece, whatever tokens spell it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from atlas.parsers import MARKERS, TOOL_FORMATS
from tests.parsers.cases import CASES
from tests.parsers.parsing import TOOLS, Case
from tests.serve.in_process import SPECIAL, Server, joined, make_model, template

ASK: list[dict[str, Any]] = [{"role": "user", "content": "yo"}]
DECLARED = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]

_SETTINGS = sorted({(case.format, case.markers) for case in CASES})


def _request(case: Case, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": ASK, "seed": seed}
    if case.format:
        body["tools"] = DECLARED
    if case.inside:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body


def _expected(case: Case) -> dict[str, Any]:
    """The choice that a client must get, of what the case says."""
    message: dict[str, Any] = {"role": "assistant", "content": case.content, "refusal": None}
    if case.reasoning:
        message["reasoning_content"] = case.reasoning
    if case.calls:
        message["content"] = case.content or None
        message["tool_calls"] = [
            {"id": None, "function": {"name": name, "arguments": arguments}, "type": "function"}
            for name, arguments in case.calls
        ]
    whole = len(case.calls) - case.cut
    reason = "tool_calls" if whole else "stop"
    return {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}


def _without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    identifiers = [call["id"] for call in choice["message"].get("tool_calls", [])]
    assert all(identifiers) and len(set(identifiers)) == len(identifiers)
    for call in choice["message"].get("tool_calls", []):
        call["id"] = None
    return choice


@pytest.mark.parametrize(("tool_format", "markers"), _SETTINGS)
def test_streamed_and_whole(tmp_path: Path, tool_format: str, markers: str) -> None:
    """Each text comes as two tokens, cut in some twelve places, inside of characters too, together or one after the
    other, and as single bytes: it is the same answer. (That every place gives the same, tests/parsers say.)"""
    cases = [case for case in CASES if (case.format, case.markers) == (tool_format, markers) and len(case.text) < 4000]
    cuts = {case.title: _cuts(case.text.encode()) for case in cases}
    pieces = [piece for pairs in cuts.values() for pair in pairs for piece in pair]
    words = MARKERS[markers] if markers else MARKERS["think"]
    model = make_model(tmp_path / "m", pieces=pieces, chat_template=template(words.start, words.end))
    server = Server(model, tool_parser=tool_format or "none", reasoning_parser=markers or "none")
    seeds = itertools.count()

    async def main() -> None:
        for case in cases:
            expected = _expected(case)
            for number, pair in enumerate(cuts[case.title]):
                way = [pair] if number % 2 else [(piece,) for piece in pair]
                seed = server.say(next(seeds), *way)
                assert _without_ids(joined(await server.stream(**_request(case, seed)))) == expected, (case, way)
            seed = server.say_text(next(seeds), case.text, group=3)
            whole = await server.chat(**_request(case, seed))
            assert _without_ids(whole["choices"][0]) == expected, case
            assert whole["usage"]["completion_tokens"] == len(server.engine.answers[seed][-1]) + 3 * (
                len(server.engine.answers[seed]) - 1
            )

    asyncio.run(main())


def _cuts(data: bytes) -> list[tuple[bytes, bytes]]:
    step = len(data) // 12 + 1
    return [(data[:at], data[at:]) for at in range(1, len(data), step)]


@pytest.mark.parametrize(("tool_format", "markers"), _SETTINGS)
def test_markers_that_are_special_tokens(tmp_path: Path, tool_format: str, markers: str) -> None:
    words = [*(TOOL_FORMATS[tool_format].words if tool_format else ())]
    if markers:
        words += [MARKERS[markers].start, MARKERS[markers].end]
    special = [word for word in dict.fromkeys(words) if word[0] in "<[" and word[-1] in ">]"]
    think = MARKERS[markers or "think"]
    model = make_model(tmp_path / "m", special=special, chat_template=template(think.start, think.end))
    server = Server(model, tool_parser=tool_format or "none", reasoning_parser=markers or "none")
    hidden, other = SPECIAL.index("<pad>"), SPECIAL.index("<|user|>")

    async def main() -> None:
        for seed, case in enumerate(CASES):
            if (case.format, case.markers) != (tool_format, markers) or len(case.text) > 4000:
                continue
            server.say_text(seed, case.text)
            # Other special tokens are not shown, wherever they stand.
            server.engine.answers[seed].insert(seed % 5, [hidden, other])
            choice = joined(await server.stream(**_request(case, seed)))
            assert _without_ids(choice) == _expected(case), case

    asyncio.run(main())
    tokens = {group[0] for groups in server.engine.answers.values() for group in groups}
    assert not special or max(tokens) >= 256 + len(SPECIAL), "no answer had one of them"


def test_all_formats_are_tried() -> None:
    assert {name for name, _ in _SETTINGS} >= set(TOOL_FORMATS)
