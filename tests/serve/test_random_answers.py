"""Answers made of the formats' own words and of pieces of real ones, asked for in every way: a stream is the answer in
one piece, to the token. More of them: `pytest -m exhaustive tests/serve/test_random_answers.py`."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from atlas.engine.sampling import choice_seed
from atlas.parsers import MARKERS, TOOL_FORMATS
from tests.parsers.cases import CASES
from tests.parsers.parsing import TOOLS
from tests.serve.in_process import Server, joined, make_model, template

DECLARED = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
WORDS = ["STOP", "ST", "\n\n", " ", "é😀", "a", '{"', "}", '"', "</s>", "<|eot|>", "hello ", "world\n"]
SEED = 5


def text_of(chance: random.Random, tool_format: str, markers: str) -> str:
    words = [*WORDS, *TOOL_FORMATS[tool_format].words, MARKERS[markers].start, MARKERS[markers].end]
    texts = [case.text for case in CASES if case.format in ("", tool_format) and len(case.text) < 600]
    pieces = []
    for _ in range(chance.randrange(1, 10)):
        text = chance.choice(texts)
        begin, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        pieces.append(chance.choice([chance.choice(words), chance.choice(words), text, text[begin:end]]))
    return "".join(pieces) or "a"


def _fields(chance: random.Random) -> dict[str, Any]:
    wishes: list[tuple[float, dict[str, Any]]] = [
        (0.8, {"tools": DECLARED}),
        (0.5, {"stop": chance.sample(["STOP", "\n\n", "}", "é", "OP"], chance.choice([1, 2]))}),
        (0.3, {"include_stop_str_in_output": True}),
        (0.3, {"parallel_tool_calls": False}),
        (0.3, {"max_tokens": chance.randrange(1, 200)}),
        (0.2, {"min_tokens": chance.randrange(30), "max_tokens": 300}),
        (0.3, {"logprobs": True}),
        (0.4, {"enable_thinking": chance.choice([True, False])}),
    ]
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "yo"}], "seed": SEED}
    for probability, wish in wishes:
        fields |= wish if chance.random() < probability else {}
    return fields


async def _same(server: Server, choices: int, **fields: Any) -> bool:
    """Streamed and in one piece. Returns whether there was a call."""
    whole = await server.chat(n=choices, **fields)
    chunks = await server.stream(n=choices, stream_options={"include_usage": True}, **fields)
    assert chunks[-1]["usage"] == whole["usage"]
    called = False
    for index, choice in enumerate(whole["choices"]):
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
        told, streamed = choice.pop("logprobs"), joined(chunks, index)
        assert (told["content"] if told else []) == [entry for part in parts for entry in part["content"]]
        streamed.pop("logprobs")
        for found in (choice, streamed):
            for call in found["message"].get("tool_calls", []):
                called, call["id"] = True, ""
        assert choice == streamed
    return called


@pytest.mark.parametrize("tool_format", sorted(TOOL_FORMATS))
def test_streamed_and_whole(tmp_path: Path, tool_format: str) -> None:
    _try(tmp_path, tool_format, 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool_format", sorted(TOOL_FORMATS))
def test_many_more(tmp_path: Path, tool_format: str) -> None:
    _try(tmp_path, tool_format, 2000)


def _try(folder: Path, tool_format: str, number: int) -> None:
    chance = random.Random(f"{tool_format} {number}")
    markers = {"mistral": "mistral", "gemma": "gemma"}.get(tool_format, "think")
    words = TOOL_FORMATS[tool_format].words
    special = [word for word in words if word[0] in "<[" and word[-1] in ">]"] if chance.random() < 0.5 else []
    starts = MARKERS[markers]
    model = make_model(folder / "m", special=special, chat_template=template(starts.start, starts.end))
    server = Server(model, tool_parser=tool_format, reasoning_parser=markers)

    async def main() -> None:
        calls = 0
        for _ in range(number):
            choices = chance.choice([1, 1, 2])
            for index in range(choices):
                group = chance.choice([1, 2, 3, 7, 50, 1000])
                server.say_text(choice_seed(SEED, index), text_of(chance, tool_format, markers), group=group)
            fields = _fields(chance)
            calls += await _same(server, choices, **fields)
        assert calls, "no answer had a call"

    asyncio.run(main())
