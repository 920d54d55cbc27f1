"""Bodies of megabytes: read in a thread, so that streams go on, and without the collector, which would take most of
the time that millions of small values cost."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from atlas.serve import body as body_module
from atlas.serve.body import LARGE_BODY, MAX_NUMBERS, MAX_VALUES, decode, parse
from atlas.serve.errors import ApiError
from atlas.serve.frontend import LARGE_TEXT
from atlas.serve.openai import responses
from atlas.serve.openai.requests import ChatRequest
from atlas.serve.routes import ENDPOINTS
from tests.serve.in_process import Server, make_model

POSTS = [endpoint.path for endpoint in ENDPOINTS if endpoint.body is not None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(make_model(tmp_path_factory.mktemp("large") / "model"))


@pytest.mark.parametrize("path", POSTS)
def test_it_is_read_in_a_thread(server: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = body_module.msgspec.json.decode
    threads: list[threading.Thread] = []

    def seen(data: Any, **options: Any) -> Any:
        if len(data) > LARGE_TEXT:
            threads.append(threading.current_thread())
        return decode(data, **options)

    monkeypatch.setattr(body_module.msgspec.json, "decode", seen)

    async def post() -> httpx.Response:
        content = json.dumps({"unknown": ["x" * 9] * (LARGE_TEXT // 8)})
        return await server.http.post(path, content=content, headers={"content-type": "application/json"})

    assert asyncio.run(post()).status_code == 400  # what the endpoint needs is missing
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_nothing_is_collected_meanwhile(tmp_path: Path) -> None:
    collections = []

    def count(phase: str, _: Any) -> None:
        collections.append(phase)

    text = b'{"messages": [], "x": [' + b"[],           " * 100_000 + b"1]}"
    gc.collect()
    gc.callbacks.append(count)
    try:
        parse(text, ChatRequest)
        assert len(collections) < 4
        for broken in (text[:-1], text.replace(b'"messages": []', b'"messages": 5')):
            with pytest.raises(ApiError):
                parse(broken, ChatRequest)
            assert gc.isenabled()
        msgspec.json.decode(text)
        assert len(collections) > 20  # what it would be
    finally:
        gc.callbacks.remove(count)


def small_values(value: Any) -> tuple[int, int]:
    """Of a decoded body: strings (names of fields too), lists and objects; numbers and other words."""
    if isinstance(value, dict | list):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        counts = [small_values(one) for one in inside]
        return 1 + sum(count[0] for count in counts), sum(count[1] for count in counts)
    return (1, 0) if isinstance(value, str) else (0, 1)


TRICKS = [
    *('a"b', "\\", "ends in \\", '\\"', '\\\\"', "[[[{{{", '"[{,', "\\n[", "é[", "\ud800"),
    *("a, b, c", '{"json": ["inside", "a string"]}', "\n\t,"),
]


@pytest.mark.parametrize("seed", range(6))
def test_values_are_counted_exactly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs in strings are none, whatever stands before them."""
    chance = random.Random(seed)

    def some(depth: int) -> Any:
        kind = chance.randrange(6 if depth < 4 else 4)
        if kind == 4:
            return [some(depth + 1) for _ in range(chance.randrange(6))]
        if kind == 5:
            return {f"{chance.choice(TRICKS)}{i}": some(depth + 1) for i in range(chance.randrange(6))}
        return chance.choice(TRICKS) if kind < 2 else chance.choice([1, -2.5e3, True, None])

    value = {"messages": [some(0) for _ in range(40)]}
    values, numbers = small_values(value)
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
        for most, fits in ((values, True), (values - 1, False)):
            monkeypatch.setattr(body_module, "MAX_VALUES", most)
            if fits:
                body_module._check_values(text)
                continue
            with pytest.raises(ApiError) as error:
                body_module._check_values(text)
            assert (error.value.status, error.value.body.code) == (413, "request_too_large")
            assert str(most) in error.value.body.message
    # Commas stand for numbers: between any values, so there are at least as many as numbers that have a neighbour.
    monkeypatch.setattr(body_module, "MAX_VALUES", values)
    monkeypatch.setattr(body_module, "MAX_NUMBERS", values + numbers)
    body_module._check_values(text)


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"a",', b'{"a":1},', b"11,", b'"\\\\",'])
def test_too_many_small_values(unit: bytes) -> None:
    most = MAX_NUMBERS if unit == b"11," else MAX_VALUES
    for count, fits in ((most // 4, True), (most + 2, False)):
        text = b'{"x": [' + unit * count + b"1]}"
        if fits:
            decode(text)
            continue
        with pytest.raises(ApiError) as error:
            decode(text)
        assert error.value.status == 413


def test_long_texts_of_signs_are_none(server: Server) -> None:
    for text in ("[{,", '"', "\\", '\\"[', "a, b: {c} [d]\n"):
        assert decode(json.dumps({"prompt": text * 2 * MAX_NUMBERS}).encode())


@pytest.mark.parametrize("path", POSTS)
def test_an_error_does_not_give_the_value_back(server: Server, path: str) -> None:
    """A client that sends a megabyte where a word belongs gets a sentence."""
    large = "x" * LARGE_BODY
    bodies: list[dict[str, Any]] = [{name: large} for name in ("messages", "prompt", "input", "tokens", "model")]
    bodies += [{"messages": [{"role": large, "content": "a"}]}, {"input": [{"role": large, "content": "a"}]}]
    bodies += [{"messages": [{"role": "user", "content": [{"type": large}]}]}, {"reasoning_effort": large}]

    async def post(body: dict[str, Any]) -> httpx.Response:
        return await server.http.post(path, json={"model": large, **body})

    for body in bodies:
        answer = asyncio.run(post(body))
        assert 400 <= answer.status_code < 500 and len(answer.content) < 2000, answer.text[:300]


def _named(place: int) -> dict[str, Any]:
    return {"name": f"f{place}", "input_schema": {}}


def _defined(place: int) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": _named(place)}}


_USER = {"role": "user", "content": "hi"}
GROWING: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "definitions": (
        "/v1/messages",
        lambda n: {
            "max_tokens": 5,
            "messages": [{"role": "system", "content": [_defined(place) for place in range(n)]}, _USER],
        },
    ),
    "uses": (
        "/v1/messages",
        lambda n: {
            "max_tokens": 0,  # wrong, which is found after all has been translated
            "messages": [_USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f"}] * n}],
        },
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_eight_times_as_much_takes_about_eight_times_as_long(server: Server, name: str) -> None:
    """And not sixty-four times: a body of 32 MB would take hours. Seconds are those of this process alone, in which
    the collector does not look at what other tests have left."""
    path, body = GROWING[name]

    async def post(content: bytes) -> httpx.Response:
        return await server.http.post(path, content=content, headers={"content-type": "application/json"})

    def seconds(size: int) -> float:
        content, began = json.dumps(body(size)).encode(), time.process_time()
        assert asyncio.run(post(content)).status_code == 400
        return time.process_time() - began

    seconds(100)
    gc.collect()
    gc.freeze()
    try:
        assert min(seconds(8_000) for _ in range(2)) < 24 * min(seconds(1_000) for _ in range(3)) + 0.05
    finally:
        gc.unfreeze()


def test_items_are_completed_in_a_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    complete = responses.complete

    def seen(item: Any) -> Any:
        threads.add(threading.current_thread())
        return complete(item)

    monkeypatch.setattr(responses, "complete", seen)
    body = {"input": [_USER] * 1000, "top_k": -5}
    assert asyncio.run(server.post("/v1/responses", **body)).status_code == 400
    assert len(threads) == 1 and threading.main_thread() not in threads
