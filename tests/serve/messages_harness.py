"""/v1/messages for tests: a server whose engine says what it was told to, and the official client."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import anthropic
import pytest
from serve_harness import ANSWER, SPECIAL, RunningServer, behaviour, make_checkpoint

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|user|>tools {{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.role }}:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})#{{ c.id }}{% endfor %}"
    "{% if m.tool_call_id %}@{{ m.name }}#{{ m.tool_call_id }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
THINK = "<think>\nLet me see 😀\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 😀", "days": 3}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEXTS = {
    "call": f"{THINK}I look.\n{CALL}",
    "calls": f"{CALL}\n{NOW}",
    "thought": f"{THINK}Grüezi!",
    "broken": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": ',
    "late": f"{CALL}\nand then",
}
SEEDS = {name: 100 + 10 * place for place, name in enumerate(TEXTS)}
GROUPS = (1, 2, 3, 7, 1000)
"""How many tokens the engine puts into one output: seed SEEDS[name] + place."""

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "Tells it",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TOOLS = [WEATHER, {"name": "now", "input_schema": {"type": "object", "properties": {}}}]


def start_server(folder: Path) -> RunningServer:
    """A server whose model has tools, and reasoning with a switch."""
    model = make_checkpoint(folder / "tiny", chat_template=TEMPLATE)
    behaviours = {
        str(SEEDS[name] + place): behaviour(text, group=group)
        for name, text in TEXTS.items()
        for place, group in enumerate(GROUPS)
    }
    behaviours |= {
        "1": behaviour("abcDEFGHIJklm"),
        "2": behaviour("uvwxyz", end=None),
        "3": behaviour("slow ", end=None, delay=0.05),
        "4": behaviour("broken", error_after=3, delay=0.05),
        "5": behaviour('{"number": 7}'),
    }
    script = {"default": behaviour(ANSWER), "behaviours": behaviours, "max_context": 4096}
    return RunningServer(folder, script, model, "--tool-parser", "hermes", "--reasoning-parser", "think")


@functools.cache
def client(server: RunningServer) -> anthropic.Anthropic:
    """The official client, which gives an error back at once. Making one takes longer than most answers."""
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20)


def fields_of(seed: int | None, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a call of the client; what its signature does not have goes beside it."""
    told = {"model": "tiny", "max_tokens": 256, "messages": HI, **fields}
    extra = {name: told.pop(name) for name in ("temperature", "top_p", "top_k", "chat_template_kwargs") if name in told}
    return {**told, "extra_body": extra | ({} if seed is None else {"seed": seed})}


def create(server: RunningServer, seed: int | None = None, **fields: Any) -> Any:
    return client(server).messages.create(**fields_of(seed, fields))


def stream(server: RunningServer, seed: int | None = None, **fields: Any) -> Any:
    """The final message of the client's stream helper."""
    with client(server).messages.stream(**fields_of(seed, fields)) as events:
        return events.get_final_message()


def plain(message: Any) -> dict[str, Any]:
    """A message without what is different each time."""
    value: dict[str, Any] = message.to_dict()
    assert re.fullmatch("msg_[0-9a-f]{24}", value.pop("id"))
    for block in value["content"]:
        if block["type"] == "tool_use":
            assert re.fullmatch("[A-Za-z0-9_-]+", block.pop("id"))
        block.pop("parsed_output", None)
    return value


def kinds(message: Any) -> list[str]:
    return [block.type for block in message.content]


def last(server: RunningServer) -> dict[str, Any]:
    entry: dict[str, Any] = server.events("submit")[-1]
    return entry


def prompt_text(server: RunningServer) -> str:
    """What the engine was given last, special tokens by their names."""
    data = b""
    for token in last(server)["prompt"]:
        data += SPECIAL[token].encode() if token < len(SPECIAL) else bytes([token - len(SPECIAL)])
    return data.decode()


def refused(server: RunningServer, kind: type[anthropic.APIStatusError], **fields: Any) -> dict[str, Any]:
    with pytest.raises(kind) as caught:
        create(server, **fields)
    error = caught.value
    assert type(error) is kind and error.request_id and error.error_code == error.body["error"]["code"]
    body: dict[str, Any] = error.body
    assert body["type"] == "error" and body["request_id"] == error.request_id
    return body["error"]
