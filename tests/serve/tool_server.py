"""A server of a model that reasons and calls tools, in the test's own process, and what tests of both ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tests.serve.in_process import Server, make_model

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


def start_tools(folder: Path) -> Server:
    """Markers of calls and of reasoning are special tokens."""
    model = make_model(folder, special=["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return Server(model, tool_parser="hermes", reasoning_parser="think")


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def prompt_text(server: Server) -> str:
    """What the model was told last, special tokens as they are written."""
    ids = server.engine.submitted[-1][0]
    text: str = server.frontend.tokenizer.show(frozenset()).decode(ids, skip_special_tokens=False)
    return text


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
