"""Random answers, as in test_random_answers.py, through the other endpoints: the official clients make of a stream what
the same request gets in one piece, with the same usage, reasons and log-probabilities."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from anthropic._models import construct_type
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent

from atlas.engine.sampling import choice_seed
from atlas.parsers import MARKERS, TOOL_FORMATS
from tests.parsers.parsing import TOOLS
from tests.serve.in_process import ANY, Server, make_model, template
from tests.serve.test_random_answers import text_of

SEED = 5
STOPS = (None, None, ["STOP"], ["\n\n"], ["}"], ["é", "OP"])


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def _neutral(value: Any) -> Any:
    """Without what differs each time: names of objects and times."""
    text = re.sub(r'"(id|call_id)": "[^"]*"', r'"\1": ""', json.dumps(value, sort_keys=True))
    return json.loads(re.sub(r'"(created_at|completed_at)": \d+', r'"\1": 0', text))


async def _both(server: Server, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole, streamed = await server.post(path, **body), await server.post(path, **{**body, "stream": True})
    assert whole.status_code == streamed.status_code == 200, (body, whole.text, streamed.text)
    return whole.json(), _events(streamed.text)


async def _completions(server: Server, chance: random.Random) -> None:
    wishes: list[tuple[float, dict[str, Any]]] = [
        (0.5, {"prompt": chance.choice([[10, 11, 12], ["a", "b"], [[10], "x"]])}),
        (0.5, {"stop": chance.choice(STOPS)}),
        (0.3, {"include_stop_str_in_output": True}),
        (0.4, {"logprobs": chance.choice([0, 1, 3])}),
        (0.3, {"echo": True}),
        (0.2, {"echo": True, "max_tokens": 0}),
        (0.2, {"prompt_logprobs": 1}),
        (0.3, {"n": 2}),
    ]
    body: dict[str, Any] = {"prompt": "yo", "seed": SEED, "max_tokens": chance.choice([1, 5, 20, 400])}
    for probability, wish in wishes:
        body |= wish if chance.random() < probability else {}
    whole, events = await _both(server, "/v1/completions", body)
    assert len({event["id"] for event in events}) == 1
    streamed = (await server.post("/v1/completions", stream=True, stream_options={"include_usage": True}, **body)).text
    assert _events(streamed)[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"], "nothing follows it"
        for name, told in (choice["logprobs"] or {}).items():
            assert [one for part in parts if part["logprobs"] for one in part["logprobs"][name]] == told
        prompt = [part["prompt_logprobs"] for part in parts if "prompt_logprobs" in part]
        assert prompt == ([choice["prompt_logprobs"]] if "prompt_logprobs" in choice else [])


async def _messages(server: Server, chance: random.Random) -> None:
    body: dict[str, Any] = {"model": "m", "max_tokens": chance.choice([1, 20, 100, 400]), "messages": YO}
    if stops := chance.choice(STOPS):
        body["stop_sequences"] = stops
    if chance.random() < 0.7:
        body["tools"] = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]
        if chance.random() < 0.3:
            body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    if chance.random() < 0.4:
        display = chance.choice(["omitted", "summarized"])
        body |= {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": display}, "max_tokens": 2000}
    whole, events = await _both(server, "/v1/messages", body)
    snapshot, arguments = None, dict[int, bytes]()
    for event in events:
        if event["type"] != "ping":
            typed: Any = construct_type(type_=RawMessageStreamEvent, value=event)
            snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=arguments)
    assert snapshot is not None and events[-1]["type"] == "message_stop"
    told = snapshot.to_dict(mode="json")
    for block in told["content"]:  # type: ignore[attr-defined]
        block.pop("parsed_output", None)
        block.pop("citations", None)
    assert _neutral(told) == _neutral(whole)


async def _responses(server: Server, chance: random.Random) -> None:
    wishes: list[tuple[float, dict[str, Any]]] = [
        (0.7, {"tools": [{"type": "function", "name": name, "parameters": TOOLS[name]} for name in TOOLS]}),
        (0.4, {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        (0.4, {"reasoning": {"summary": "auto"}}),
        (0.5, {"stop": chance.choice(STOPS)}),
        (0.3, {"parallel_tool_calls": False}),
    ]
    body: dict[str, Any] = {"input": "yo", "max_output_tokens": chance.choice([1, 20, 100, 400])}
    for probability, wish in wishes:
        body |= wish if chance.random() < probability else {}
    whole, events = await _both(server, "/v1/responses", body)
    final = events[-1]["response"]
    assert _neutral(final) == _neutral(whole)
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    said: dict[tuple[int, str], str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            place = event["output_index"], event["item_id"]
            said[place] = said.get(place, "") + event["delta"]
    for (index, item_id), text in said.items():
        item = final["output"][index]
        parts = item.get("content") or item.get("summary") or []
        assert item["id"] == item_id
        assert text == (item["arguments"] if item["type"] == "function_call" else "".join(p["text"] for p in parts))


YO = [{"role": "user", "content": "yo"}]


@pytest.mark.parametrize("tool_format", sorted(TOOL_FORMATS))
def test_streamed_and_whole(tmp_path: Path, tool_format: str) -> None:
    _try(tmp_path, tool_format, 8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool_format", sorted(TOOL_FORMATS))
def test_many_more(tmp_path: Path, tool_format: str) -> None:
    _try(tmp_path, tool_format, 600)


def _try(folder: Path, tool_format: str, number: int) -> None:
    chance = random.Random(f"{tool_format} {number}")
    markers = {"mistral": "mistral", "gemma": "gemma"}.get(tool_format, "think")
    starts = MARKERS[markers]
    model = make_model(folder / "m", chat_template=template(starts.start, starts.end))
    server = Server(model, tool_parser=tool_format, reasoning_parser=markers)

    async def main() -> None:
        for _ in range(number):
            for seed in (ANY, *(choice_seed(SEED, index) for index in range(4))):
                group = chance.choice([1, 2, 3, 7, 50, 1000])
                server.say_text(seed, text_of(chance, tool_format, markers), group=group)
            for ask in (_completions, _messages, _responses):
                await ask(server, chance)

    asyncio.run(main())
