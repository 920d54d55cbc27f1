"""An engine that breaks, a shutdown, a time that is over: a stream tells every token that was made before, then why it
ends; an answer in one piece is the error."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atlas.config import EngineConfig
from atlas.engine.client import EngineClient, EngineStream
from atlas.engine.messages import SamplingParams, SequenceOutput, StepOutput, TokenLogprobs
from atlas.serve.access.limits import Account
from atlas.serve.errors import ApiError
from atlas.serve.generation import Delta, Job, generate_all
from tests.serve.in_process import Server, make_model
from tests.serve.serve_harness import ids_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TEXTS = (
    "plain é😀漢 text that ENds",
    f"<think>\nto add\n</think>\n\nLet me see. {CALL}",
    f"{CALL}\n{CALL} and EN more <think>of it",
    "<think>only thoughts é😀 ",
)
TOOL: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}], "stop": "END"},
    "/v1/completions": {"prompt": "x", "stop": "END", "max_tokens": 1000},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 1000,
        "messages": MESSAGES,
        "tools": [{"name": "add", "input_schema": TOOL["parameters"]}],
        "stop_sequences": ["END"],
    },
    "/v1/responses": {"input": "x", "tools": [{"type": "function", **TOOL}]},
}


class Engine(EngineClient):
    """The real client, and no process: sequence by sequence it is given what stands in `plans`, which may be joined
    with what came before when it is read."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(model="/m"))
        self.state = "ready"
        self.plans: list[list[SequenceOutput]] = []
        self.together = False
        self._feeding: list[asyncio.Task[None]] = []

    def submit(self, prompt: list[int], sampling: SamplingParams) -> EngineStream:
        stream = super().submit(prompt, sampling)
        self._feeding.append(asyncio.create_task(self._feed(stream.request_id, self.plans.pop(0), sampling)))
        return stream

    async def _feed(self, request_id: str, plan: list[SequenceOutput], sampling: SamplingParams) -> None:
        for output in plan:
            told = (
                () if sampling.logprobs is None else tuple(TokenLogprobs(i, -1.0, 1, [], []) for i in output.token_ids)
            )
            named = msgspec.structs.replace(output, request_id=request_id, logprobs=told)
            self._receive(StepOutput([named]))
            if not self.together:
                for _ in range(5):
                    await asyncio.sleep(0)


def _plan(ids: list[int], group: int, reason: Any, *, apart: bool) -> list[SequenceOutput]:
    """Groups of ids; the reason with the last of them, or apart from it."""
    plan = [SequenceOutput("", ids[at : at + group]) for at in range(0, len(ids), group)]
    error = None if reason == "length" else "it broke"
    if apart:
        return [*plan, SequenceOutput("", [], reason, error)]
    return [*plan[:-1], SequenceOutput("", plan[-1].token_ids, reason, error)]


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def _said(path: str, events: list[dict[str, Any]]) -> dict[str, str]:
    """What a stream's deltas say, by kind."""
    said: dict[str, str] = {}

    def add(kind: str, text: str | None) -> None:
        said[kind] = said.get(kind, "") + (text or "")

    for event in events:
        if path == "/v1/messages" and event["type"] == "content_block_delta":
            for name in ("text", "thinking", "partial_json"):
                add(name, event["delta"].get(name))
        elif path == "/v1/responses" and event["type"].endswith(".delta"):
            add(event["type"], event["delta"])
        for choice in event.get("choices", ()):
            add("text", choice.get("text"))
            delta = choice.get("delta", {})
            add("content", delta.get("content"))
            add("reasoning", delta.get("reasoning_content"))
            for call in delta.get("tool_calls", ()):
                add("calls", call["function"].get("name", "") + call["function"]["arguments"])
    return {kind: text for kind, text in said.items() if text}


def _error(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The error that a stream ends with."""
    if path == "/v1/responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.failed"
        return dict(events[-1]["response"]["error"])
    assert "error" in events[-1] and not any("error" in event for event in events[:-1])
    return dict(events[-1]["error"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("broken") / "m")


def _server(model: Path) -> tuple[Server, Engine]:
    server = Server(model, tool_parser="hermes", reasoning_parser="think")
    engine = Engine()
    server.service.serving = type(server.service.serving)(  # type: ignore[misc]
        engine,
        server.frontend,
        server.service.serving.ready,
        "fp",  # type: ignore[union-attr]
    )
    return server, engine


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_tells_all_tokens_before_it_tells_why_it_breaks(model: Path, path: str) -> None:
    async def main() -> None:
        server, engine = _server(model)
        chance = random.Random(path)
        for _ in range(40):
            ids = ids_of(chance.choice(TEXTS))
            ids = ids[: chance.randrange(1, len(ids) + 1)]
            engine.together = chance.random() < 0.5
            reason, apart, group = chance.choice(("error", "abort")), chance.random() < 0.5, chance.choice((1, 3, 1000))
            body = BODIES[path] | ({"logprobs": True} if "chat" in path and chance.random() < 0.3 else {})
            engine.plans = [_plan(ids, 1, "length", apart=False)] + [_plan(ids, group, reason, apart=apart)] * 2
            right = _said(path, _events((await server.post(path, stream=True, **body)).text))
            events = _events((await server.post(path, stream=True, **body)).text)
            assert _said(path, events) == right
            assert "it broke" in _error(path, events)["message"]
            whole = await server.post(path, **body)
            assert whole.status_code == (503 if reason == "abort" else 500) and "it broke" in whole.text

    asyncio.run(main())


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_was_complete_before_is_no_error(model: Path, path: str) -> None:
    """A stop string, or an end, that came before the engine broke."""

    async def main() -> None:
        server, engine = _server(model)
        body = {name: value for name, value in BODIES[path].items() if name != "tools"}
        text = "some END more" if path != "/v1/responses" else "some<|eot|>"
        ids = server.frontend.tokenizer.encode(text, add_special_tokens=False)
        for group in (1, 1000):
            plan = _plan(ids, group, "error" if "END" in text else "stop", apart=False)
            engine.plans, engine.together = [plan, plan], True
            whole = await server.post(path, **body)
            assert whole.status_code == 200 and "some" in whole.text and "broke" not in whole.text
            events = _events((await server.post(path, stream=True, **body)).text)
            assert "".join(_said(path, events).values()) == ("some " if "END" in text else "some")
            assert not any("error" in event for event in events)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_where_one_choice_breaks_the_others_tell_what_they_have(model: Path, path: str) -> None:
    async def main() -> None:
        server, engine = _server(model)
        ids = ids_of("abcdefgh")
        engine.together = True
        engine.plans = [_plan(ids, 1, "length", apart=False), _plan(ids, 1, "error", apart=True)]
        engine.plans.insert(1, [SequenceOutput("", [token]) for token in ids])  # goes on
        events = _events((await server.post(path, stream=True, n=3, **BODIES[path])).text)
        told = ["", "", ""]
        for event in events[:-1]:
            for choice in event["choices"]:
                told[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        assert told == ["abcdefgh"] * 3
        assert "it broke" in _error(path, events)["message"]
        assert not engine.running, "what nobody waits for is aborted"

    asyncio.run(main())


@pytest.mark.parametrize("choices", [1, 2])
def test_when_its_time_is_over_a_slow_reader_gets_what_was_made(model: Path, choices: int) -> None:
    async def main() -> None:
        engine, account = Engine(), Account()
        ids = ids_of("abcdefgh")
        engine.plans = [[SequenceOutput("", [token]) for token in ids] for _ in range(choices)]
        tokenizer = Server(model).frontend.tokenizer
        jobs = [Job(index, [1], SamplingParams(max_tokens=1000), ()) for index in range(choices)]
        told = [""] * choices
        with pytest.raises(ApiError) as raised:
            async with account.within(0.1):
                deltas = generate_all(engine, tokenizer, jobs, account)
                async for delta in deltas:
                    assert isinstance(delta, Delta)
                    told[delta.index] += delta.text
                    await asyncio.sleep(0.06)
        assert told == ["abcdefgh"] * choices
        assert (raised.value.status, raised.value.body.code) == (504, "request_timed_out")
        assert not engine.running

    asyncio.run(main())


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
ANTHROPIC_FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
            "response_format.json_schema.schema",
        ),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tools"),
        ("/v1/completions", {"guided_regex": "a+"}, "guided_regex"),
        ("/v1/messages", {"output_config": {"format": ANTHROPIC_FORMAT}, "tools": []}, "output_config.format.schema"),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, "tools"),
        ("/v1/responses", {"text": {"format": FORMAT}, "tools": []}, "text.format.schema"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_named(model: Path, path: str, fields: dict[str, Any], named: str) -> None:
    async def main() -> None:
        server, engine = _server(model)
        body = BODIES[path] | fields
        if "response_format" in fields:
            del body["tools"]
        engine.plans = [[SequenceOutput("", ids_of("{"), "error", "it is too ambiguous", by_grammar=True)]] * 2
        error = (await server.post(path, **body)).json()["error"]
        assert (error["code"], error["param"]) == ("grammar_too_complex", named)
        assert error["message"] == f"{named}: it is too ambiguous"
        last = _error(path, _events((await server.post(path, stream=True, **body)).text))
        assert last["message"] == f"{named}: it is too ambiguous"

    asyncio.run(main())
