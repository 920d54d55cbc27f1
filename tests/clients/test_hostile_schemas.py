"""Schemas, patterns, grammars and conversations made to cost much: refused or answered soon, and nobody else waits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest

from tests.clients.scripted import scripted_server
from tests.serve.serve_harness import RunningServer

PATH = "/v1/chat/completions"
YO: Any = [{"role": "user", "content": "yo"}]
MOST_SECONDS = 15.0
MOST_STALL = 5.0
"""Seconds that a health check may take meanwhile. It is half a second at worst, but for machines that do much else."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("bombs")) as running:
        yield running


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(levels: int) -> Any:
    """Definitions each of which holds the one before twice."""
    definitions: Any = {"d0": {"type": "string"}}
    for level in range(1, levels):
        inner = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a", "b"]}
    return {"$defs": definitions, "$ref": f"#/$defs/d{levels - 1}"}


def choices(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


SCHEMAS: dict[str, Any] = {
    "nested 100": nested(100),
    "nested 300": nested(300),
    "doubling 40": doubling(40),
    "doubling by choice": choices(12),
    "a member for each of 5,000": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}},
    "2,000 optional members": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(2000)},
        "additionalProperties": False,
    },
    "an enum of 100,000": {"enum": [f"value {i}" for i in range(100_000)]},
    "a million items": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
    "a million characters": {"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000},
    "huge bounds": {"type": "integer", "minimum": 10**300, "maximum": 10**301},
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "all of itself": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "counted": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    "exponential": {"type": "string", "pattern": "^(a+)+$"},
    "many alternatives": {"type": "string", "pattern": "|".join(f"(a{i}.*b)" for i in range(2000))},
    "all of many patterns": {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(60)]},
    "not an object": 5,
    "a list": [],
    "wrong everywhere": {"type": [[]], "properties": 3, "required": {}, "items": "x", "enum": {}},
}
EXTRAS: dict[str, Any] = {
    "counted": {"guided_regex": "((a{1,500}){1,500}){1,500}"},
    "exponential": {"guided_regex": "(.*a.*){30}"},
    "unicode": {"guided_regex": "\\p{L}{1,2000}\\p{M}*"},
    "a million": {"guided_regex": "a" * 1_000_000},
    "deep": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "choices": {"guided_choice": ["x" * 100 + str(i) for i in range(50_000)]},
    "a long choice": {"guided_choice": ["x" * 1_000_000]},
    "left recursion": {"guided_grammar": 'start: start start | start "a" |'},
    "ambiguous": {"guided_grammar": 'start: a a a a a a a a a a\na: a a | "x" |'},
    "doubling": {
        "guided_grammar": 'start: r30\nr0: "a"\n' + "\n".join(f"r{i}: r{i - 1} r{i - 1}" for i in range(1, 31))
    },
    "rules": {"guided_grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(20_000))},
    "import": {"guided_grammar": '%import "/etc/passwd"\nstart: "a"'},
    "no start": {"guided_grammar": "x: y"},
}
CONVERSATIONS: dict[str, Any] = {
    "10,000 tools": {
        "tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(10_000)]
    },
    "100 tools, some": {
        "tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": nested(9)}} for i in range(100)],
        "tool_choice": "required",
    },
    "a bomb in a tool": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": doubling(40)}}],
        "tool_choice": "required",
    },
    "100,000 messages": {"messages": YO * 100_000},
    "100,000 parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]},
    "100,000 calls": {
        "messages": [
            *YO,
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}] * 100_000},
        ]
    },
    "deep arguments": {
        "messages": [
            *YO,
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":' * 90_000}}],
            },
        ]
    },
    "10 million lists": {"unknown": [[]] * 10_000_000},
    "a million keys": {f"k{i}": 1 for i in range(1_000_000)},
    "half a million parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 500_000}]},
    "deep variables": {"chat_template_kwargs": {"a": json.loads("[" * 400 + "]" * 400)}},
    "n": {"n": 1_000_000},
    "100,000 biases": {"logit_bias": {str(i): 1 for i in range(100_000)}},
    "100,000 stops": {"stop": ["x"] * 100_000},
    "a long stop": {"stop": "x" * 1_000_000},
    "8 MB of text": {"messages": [{"role": "user", "content": "a " * (4 << 20)}]},
    "one word of 8 MB": {"messages": [{"role": "user", "content": "a" * (8 << 20)}]},
    "control tokens": {"messages": [{"role": "user", "content": "<|user|><|assistant|><s>" * 100_000}]},
}
CASES = {
    **{
        f"schema: {name}": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
        for name, schema in SCHEMAS.items()
    },
    **{f"guided: {name}": extra for name, extra in EXTRAS.items()},
    **CONVERSATIONS,
}


FEW = {
    *(
        f"schema: {name}"
        for name in ("nested 300", "doubling 40", "2,000 optional members", "itself", "a circle", "counted")
    ),
    *(f"guided: {name}" for name in ("counted", "exponential", "deep", "doubling", "no start")),
    *(
        "10,000 tools",
        "a bomb in a tool",
        "100,000 messages",
        "10 million lists",
        "deep arguments",
        "n",
        "8 MB of text",
    ),
}
"""One of each kind, and each that found a fault, for the default run."""


def some(names: Iterable[str]) -> list[Any]:
    """Test cases: those of FEW for the default run, the others for the exhaustive one."""
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in names]


class Watch(threading.Thread):
    """Asks after the server's health all the time; `worst` is the longest that it took."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.worst, self.stopped = url, 0.0, threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self.stopped.wait(0.02):
                started = time.monotonic()
                assert client.get(self.url + "/health").status_code == 200
                self.worst = max(self.worst, time.monotonic() - started)


@pytest.mark.parametrize("name", some(CASES))
def test_it_costs_little_and_nobody_waits(server: RunningServer, name: str) -> None:
    body = json.dumps({"messages": YO, "max_tokens": 5, **CASES[name]}, separators=(",", ":")).encode()
    watch = Watch(server.url)
    watch.start()
    started = time.monotonic()
    try:
        answer = httpx.post(
            server.url + PATH, content=body, headers={"content-type": "application/json"}, timeout=MOST_SECONDS
        )
    finally:
        watch.stopped.set()
        watch.join()
    assert answer.status_code in (200, 400, 413), answer.text[:300]
    if answer.status_code == 413:
        assert answer.json()["error"]["code"] == "request_too_large"
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"] and error["code"] and len(error["message"]) < 1000
    assert time.monotonic() - started < MOST_SECONDS and watch.worst < MOST_STALL
    status = httpx.post(server.url + PATH, json={"messages": YO, "max_tokens": 5}, timeout=10).status_code
    assert status == 200
