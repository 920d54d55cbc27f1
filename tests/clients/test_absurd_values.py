"""Every field of every endpoint with values that no sane client sends: never a failure of the server, always an error
of the API's shape that names the field, or an answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from atlas.serve.reference.endpoint import Endpoint
from atlas.serve.routes import ENDPOINTS
from tests.clients.scripted import scripted_server
from tests.serve.serve_harness import RunningServer

ABSURD = [
    *("null", "true", "false", "0", "-0", "1", "-1", "0.5", "-0.5", "1e-320", "1e308", "-1e308", "1E999", "-1e999"),
    *("NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "0x10"),
    *(str(sign * 2**bits + more) for bits in (31, 53, 63, 64) for sign in (1, -1) for more in (-1, 0, 1)),
    *("1" + "0" * 400, "-" + "9" * 5000, "1e18", "0.1" + "3" * 400),
    *('""', '"x"', '"0"', '"\\u0000"', '"\\ud800"', '"\\udc00x"', '"\ud800"', '"\\x"', '"' + "y" * 20_000 + '"'),
    *(
        "[]",
        "{}",
        "[[]]",
        "[{}]",
        "[null]",
        "[0]",
        '["x"]',
        "[1e999]",
        "[" + "2," * 3000 + "2]",
        '["a", 1]',
        "[18446744073709551616]",
    ),
    *('{"a": null}', '{"a": {"a": [1]}}', '{"": ""}', '{"a": 1, "a": 2}', '{"1": 1e999}', '{"\\ud800": 1}'),
    *('{"type": "x"}', '{"type": 5}', '{"type": null}', '{"type": []}', '{"role": "user", "content": "x"}'),
    *("[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300, "[" * 100_000, '{"a":' * 100_000),
    *("", "nothing", "/* x */ 1", "'x'", "\x00"),
]
"""As they stand in the body: some are no JSON."""

MARK = "\ue000here\ue000"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "x"}]},
            {"role": "user", "content": "x", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "y"},
            {"role": "tool", "content": "z", "tool_call_id": "c1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "logit_bias": {"5": 1},
        "stream_options": {"include_usage": True},
        "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "reasoning": {"effort": "low", "max_tokens": 5},
        "chat_template_kwargs": {"x": 1},
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "structured_outputs": {"json": SCHEMA},
        "stop": ["§"],
        "stop_token_ids": [5],
    },
    "/v1/completions": {
        "prompt": "x",
        "logit_bias": {"5": 1},
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["§"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "z"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "medium"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"],
        "stream_options": {"include_obfuscation": False},
        "store": False,
    },
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "b"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "z"}]},
        ],
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["§"],
    },
    "/v1/embeddings": {"input": ["x"], "encoding_format": "float"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
BODIES["/v1/messages/count_tokens"] = {
    name: value
    for name, value in BODIES["/v1/messages"].items()
    if name not in ("max_tokens", "stop_sequences", "metadata")
}
BODIES["/v1/responses/input_tokens"] = BODIES["/v1/responses"]
LEAST: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("input", "store"),
    "/v1/responses/input_tokens": ("input", "store"),
    "/v1/messages": ("max_tokens", "messages"),
    "/v1/messages/count_tokens": ("messages",),
}
"""What stays while one field is replaced: no two fields contradict each other then."""

POSTS = {endpoint.path: endpoint for endpoint in ENDPOINTS if endpoint.body is not None}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("absurd")) as running:
        yield running


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a body."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*path, key)
        yield from places(item, (*path, key))


def cases(endpoint: Endpoint) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Paths to replace, and the body each is replaced in, with a mark in its place."""
    full = BODIES[endpoint.path]
    names = {*endpoint.body.__struct_fields__, *endpoint.refused, "unknown_field"}
    paths = [(name,) for name in sorted(names)]
    paths += [path for path in places(full) if len(path) > 1]
    for path in paths:
        least = LEAST.get(endpoint.path, full)
        keep = {path[0], *(least if path[0] != "messages" or endpoint.path != "/tokenize" else ())}
        body = json.loads(json.dumps({name: value for name, value in full.items() if name in keep}))
        node = body
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = MARK
        yield path, body


def check(answer: httpx.Response, path: tuple[Any, ...], value: str) -> None:
    """An answer, or an error of the API's shape that names the field that was replaced."""
    shown = f"{path} = {value[:60]!r}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code in (200, 400, 404, 413), shown
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("application/json"):
            json.loads(answer.text, parse_constant=pytest.fail)
        else:
            assert '"error"' not in answer.text.replace('"error":null', ""), shown
        return
    body = json.loads(answer.text, parse_constant=pytest.fail)
    error = body["error"]
    assert error["message"] and error["type"] and error["code"] and "param" in error, shown
    # Of no field, of all that make the prompt.
    if error["code"] in ("invalid_json", "request_too_large", "context_length_exceeded"):
        return
    instead = {"prompt"} if path[0] == "messages" else set()  # /tokenize wants one of the two
    assert str(error["param"]).startswith(str(path[0])) or error["param"] in instead, shown
    assert error["param"].split(".")[0].split("[")[0] in error["message"], shown


def run(server: RunningServer, path: str, values: Callable[[tuple[Any, ...]], list[str]]) -> None:
    headers = {"content-type": "application/json"}
    faults = []
    count = 0
    for place, body in cases(POSTS[path]):
        before, after = json.dumps(body).split(json.dumps(MARK))
        for value in values(place):
            content = (before + value + after).encode(errors="surrogatepass")
            answer = server.http.post(path, content=content, headers=headers)
            count += 1
            try:
                check(answer, place, value)
            except (AssertionError, KeyError, TypeError, ValueError) as fault:
                faults.append(str(fault))
    assert not faults, f"{len(faults)} of {count}:\n" + "\n".join(faults[:: max(1, len(faults) // 40)])
    assert server.health() == 200 and len(server.events("configure")) == 1


@pytest.mark.parametrize("path", sorted(POSTS))
def test_every_field_with_some_absurd_values(server: RunningServer, path: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    run(server, path, lambda place: rng.sample(ABSURD, 14 if len(place) == 1 else 6))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted(POSTS))
def test_every_field_with_all_absurd_values(server: RunningServer, path: str) -> None:
    run(server, path, lambda place: ABSURD)


QUERY = [
    "",
    "0",
    "-1",
    "1",
    "true",
    "NaN",
    "1e999",
    "9" * 400,
    "x" * 20_000,
    "%00",
    "%ff%fe",
    "%F0%9F%98%80",
    "[]",
    "a&limit=2",
]
NAMES = [
    "x",
    "%00",
    "%ff",
    "..",
    "%2e%2e%2f",
    "a/b",
    "%F0%9F%98%80",
    "y" * 3000,
    "resp_" + "0" * 48,
    "'%22<script>",
    " ",
    "?",
]


def test_every_query_and_path_with_absurd_values(server: RunningServer) -> None:
    made = server.http.post("/v1/responses", json={"input": "yo"}).json()["id"]
    count = 0
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            continue
        names = [made, *NAMES] if "{" in endpoint.path else [""]
        for name in names:
            path = re.sub(r"\{.*\}", lambda _, name=name: name, endpoint.path)
            queries = ["unknown=1", *(f"{key}={value}" for key in endpoint.query for value in QUERY)]
            for query in [""] if endpoint.method == "DELETE" else ["", *queries]:
                answer = server.http.request(endpoint.method, f"{path}?{query}")
                count += 1
                shown = f"{endpoint.method} {path[:80]}?{query[:80]}: {answer.status_code} {answer.text[:300]}"
                assert answer.status_code < 500, shown
                if answer.status_code >= 400:
                    error = json.loads(answer.text)["error"]
                    assert error["message"] and error["type"] and error["code"] and len(answer.text) < 2000, shown
                if answer.status_code == 400:
                    assert error["param"] and error["param"].split("[")[0] in error["message"], shown
    assert count > 200 and server.health() == 200
