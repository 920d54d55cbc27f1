"""A server for tests of /v1/responses, and what they ask it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
from serve_harness import ANSWER, SPECIAL, RunningServer, behaviour, make_checkpoint

MODEL = "tiny"
TRANSPARENT = "{{ messages | tojson }}{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking %}?{% endif %}"
"""Shows all that a template is given."""

TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BEHAVIOURS = {
    "1": behaviour("plain"),
    "2": behaviour("for ever ", end=None),
    "3": behaviour("slow ", end=None, delay=0.05),
    "4": behaviour("broken", delay=0.05, error_after=4),
    "7": behaviour(f"<think>\nto add\n</think>\n\nLet me see. {CALL}"),
    "8": behaviour(f"<think>\nto add\n</think>\n\nLet me see. {CALL}", group=7),
    "9": behaviour("<think>\nnot done"),
}


def start_reasoner(folder: Path) -> RunningServer:
    """A model that reasons and calls tools, whose template shows what it is given."""
    model = make_checkpoint(folder / MODEL, chat_template=TRANSPARENT)
    script = {"default": behaviour(ANSWER), "behaviours": BEHAVIOURS, "max_context": 4096}
    flags = ("--served-model-name", MODEL, "--tool-parser", "hermes", "--reasoning-parser", "think")
    return RunningServer(folder, script, model, *flags)


def ask(client: openai.OpenAI, given: Any = "Hello", seed: int | None = None, **options: Any) -> Any:
    body = {**options.pop("extra_body", {}), **({} if seed is None else {"seed": seed})}
    return client.responses.create(model=MODEL, input=given, extra_body=body, **options)


def messages_of(server: RunningServer) -> list[dict[str, Any]]:
    """The conversation that the template was last given."""
    prompt = server.events("submit")[-1]["prompt"]
    text = bytes(token - len(SPECIAL) for token in prompt if token >= len(SPECIAL)).decode()
    found: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text)[0]
    return found
