"""Rates, requests at once, the queue and the time limit: what is refused, when it is let in again, and who pays."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from asgi import Answer, Inner, ask, nothing_more, scope_of
from serve_harness import ANSWER, RunningServer, Start, behaviour, eventually
from starlette.types import Message, Receive, Scope, Send

from atlas.config import ServeConfig, load
from atlas.errors import ConfigError
from atlas.serve.access.auth import CLIENT
from atlas.serve.access.limits import Account, Bucket, Client, Deadline, Limits, Queue, account_of
from atlas.serve.errors import ApiError

CHAT = "/v1/chat/completions"
YO = {"messages": [{"role": "user", "content": "yo"}]}


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---- buckets -------------------------------------------------------------------------------------


def test_a_bucket_holds_a_minute_and_fills_evenly() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    for _ in range(60):
        assert bucket.wait() == 0
        bucket.spend(1)
    assert bucket.wait() == pytest.approx(1)
    clock.now += 0.75
    assert bucket.wait() == pytest.approx(0.25)
    clock.now += 0.25
    assert bucket.wait() == 0
    clock.now += 10_000  # a long pause saves up no more than a minute's worth
    assert bucket.level == 60


def test_a_bucket_in_debt() -> None:
    clock = Clock()
    bucket = Bucket(600, clock)
    bucket.spend(800)
    assert bucket.level == pytest.approx(-200)
    assert bucket.wait() == pytest.approx(20.1)
    clock.now += 20.1
    assert bucket.wait() == pytest.approx(0, abs=1e-6)


def test_a_bucket_that_is_asked_often_loses_nothing() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.spend(60)
    for _ in range(1000):
        clock.now += 0.01
        assert bucket.level >= 0
    assert bucket.level == pytest.approx(10)


# ---- the layer -----------------------------------------------------------------------------------


def limited(inner: Any, clock: Clock | None = None, **settings: Any) -> Callable[..., Awaitable[Answer]]:
    """Ask as a client: `await asks("alice")`."""
    layer = Limits(inner, ServeConfig(**settings), clock or Clock())

    async def as_client(scope: Scope, receive: Receive, send: Send, name: str) -> None:
        await layer({**scope, CLIENT: name}, receive, send)

    async def asks(name: str = "alice", **request: Any) -> Answer:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await as_client(scope, receive, send, name)

        return await ask(app, **request)

    return asks


def refused(answer: Answer, code: str, *words: str) -> int:
    """Checks a 429 and returns its Retry-After."""
    error = answer.error()
    assert (answer.status, error["code"], error["type"]) == (429, code, "rate_limit_error"), answer
    for word in words:
        assert word in error["message"]
    return int(answer.headers["retry-after"])


def test_requests_per_minute() -> None:
    async def main() -> None:
        clock, inner = Clock(), Inner()
        asks = limited(inner, clock, requests_per_minute=3)
        left = [(await asks()).headers["x-ratelimit-remaining-requests"] for _ in range(3)]
        assert left == ["2", "1", "0"]
        wait = refused(await asks(), "rate_limit_exceeded", "requests", "3 per minute")
        assert wait == 20 and len(inner.scopes) == 3
        assert (await asks("bob")).status == 200  # each key has its own
        for _ in range(50):
            await asks()  # being refused costs nothing
        clock.now += wait
        assert (await asks()).status == 200
        refused(await asks(), "rate_limit_exceeded")
        assert (await asks(method="GET")).status == 200

    asyncio.run(main())


def test_while_the_server_ends_nobody_is_told_to_come_back() -> None:
    async def main() -> None:
        ends: list[bool] = []
        config = ServeConfig(requests_per_minute=1)
        layer = Limits(Inner(), config, Clock(), draining=lambda: bool(ends))
        assert (await ask(layer)).status == 200
        refused(await ask(layer), "rate_limit_exceeded")
        ends.append(True)
        answer = await ask(layer)
        assert (answer.status, answer.error()["code"]) == (503, "server_shutting_down")

    asyncio.run(main())


@pytest.mark.parametrize("header", ["x-forwarded-for", "x-real-ip", "forwarded", "x-api-key", "authorization"])
def test_no_header_makes_a_new_client(header: str) -> None:
    """Without keys all share one allowance; only the authentication says who is who."""

    async def main() -> None:
        layer = Limits(Inner(), ServeConfig(requests_per_minute=2), Clock())
        statuses = [(await ask(layer, headers=[(header, f"203.0.113.{i}")])).status for i in range(3)]
        assert statuses == [200, 200, 429]

    asyncio.run(main())


def test_tokens_per_minute() -> None:
    async def main() -> None:
        clock = Clock()

        async def work(scope: Scope) -> None:
            account_of(scope).spend(150)

        asks = limited(Inner(work), clock, tokens_per_minute=100, requests_per_minute=50)
        first = await asks()  # nobody knows before how many they will be
        assert first.status == 200 and first.headers["x-ratelimit-remaining-tokens"] == "0"
        wait = refused(await asks(), "rate_limit_exceeded", "tokens", "100 per minute")
        assert wait == 31
        assert (await asks("bob")).headers["x-ratelimit-remaining-requests"] == "49"
        clock.now += wait
        answer = await asks()
        assert answer.status == 200
        # The refused one took no request.
        assert answer.headers["x-ratelimit-remaining-requests"] == "49"

    asyncio.run(main())


@pytest.mark.parametrize("end", ["answer", "fails", "cancelled"])
def test_requests_at_once(end: str) -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def work(scope: Scope) -> None:
            account_of(scope).enter_queue(3)
            await go.wait()
            if end == "fails":
                raise RuntimeError("a fault")

        asks = limited(Inner(work), max_concurrent=2, max_queue=6)
        tasks = [asyncio.create_task(asks()) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert refused(await asks(), "concurrency_limit_exceeded", "2 requests", "at most 2") >= 1
        go.set()
        if end == "cancelled":
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Whatever became of them, they are not counted any more.
        if end == "fails":
            with pytest.raises(RuntimeError):
                await asks()
        else:
            assert (await asks()).status == 200

    asyncio.run(main())


def test_anthropics_paths_get_anthropics_errors() -> None:
    async def main() -> None:
        asks = limited(Inner(), requests_per_minute=1)
        await asks(path="/v1/messages")
        body = msgspec.json.decode((await asks(path="/v1/messages")).body)
        assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")

    asyncio.run(main())


def test_no_limits_no_headers() -> None:
    answer = asyncio.run(limited(Inner())())
    assert answer.status == 200 and answer.headers == {}


# ---- the queue -----------------------------------------------------------------------------------


def test_the_queue() -> None:
    queue, client = Queue(4), Client(ServeConfig(), Clock())
    first, second = Account(client, queue), Account(client, queue)
    first.enter_queue(3)
    with pytest.raises(ApiError) as error:
        second.enter_queue(2)
    assert (error.value.status, error.value.body.code) == (429, "queue_full")
    assert error.value.headers["Retry-After"] and "3 sequences" in error.value.body.message
    second.enter_queue(1)
    first.leave_queue()
    second.close()
    assert queue.waiting == 2
    second.leave_queue()  # too late: it must not free another's place
    assert queue.waiting == 2
    second.enter_queue(2)
    first.close()
    first.close()
    assert queue.waiting == 2


def test_nobody_keeps_others_out_of_the_queue() -> None:
    """Each that comes gets at least what would be its share; none more than that once the queue is full."""
    queue = Queue(12)
    accounts = {owner: Account(queue=queue, owner=owner) for owner in "abcd"}

    def fill(owner: str) -> int:
        before = queue.waiting
        with pytest.raises(ApiError) as error:
            for _ in range(100):
                accounts[owner].enter_queue(1)
        assert error.value.body.code == "queue_full"
        return queue.waiting - before

    assert [fill(owner) for owner in "abcd"] == [12, 6, 4, 3]
    assert fill("a") == 0
    for _ in range(10):
        accounts["a"].leave_queue()
    assert fill("a") == 1  # three are its share
    for account in accounts.values():
        account.close()
    assert queue.waiting == 0 and not queue._owners
    assert fill("b") == 12


def test_a_batch_larger_than_the_queue_waits_alone() -> None:
    queue = Queue(4)
    big, small = Account(None, queue), Account(None, queue)
    big.enter_queue(100)
    with pytest.raises(ApiError):
        small.enter_queue(1)
    big.close()
    small.enter_queue(1)
    with pytest.raises(ApiError):
        big.enter_queue(100)


# ---- the time limit ------------------------------------------------------------------------------


async def run_deadline(app: Any, seconds: float, path: str = "/v1/x", method: str = "POST") -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async with asyncio.timeout(3):
        await Deadline(app, seconds)(scope_of(method, path, []), nothing_more(), send)
    return messages


def slow_stream(ended: list[str], content_type: bytes) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}
        await send(start)
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("closed")

    return app


def test_an_answer_that_takes_too_long() -> None:
    stopped: list[str] = []

    async def work(_: Scope) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("stopped")

    start, body = asyncio.run(run_deadline(Inner(work), 0.05))
    assert start["status"] == 504 and stopped == ["stopped"]
    error = msgspec.json.decode(body["body"])["error"]
    assert (error["code"], error["type"]) == ("request_timed_out", "server_error")
    assert "0.05 s" in error["message"] and "--request-timeout" in error["message"]
    # The official clients obey this: asked again, it would take as long again.
    assert (b"x-should-retry", b"false") in start["headers"]


@pytest.mark.parametrize(
    ("path", "start", "end"),
    [
        ("/v1/x", b"data: {", b"data: [DONE]\n\n"),
        ("/v1/messages", b"event: error\ndata: {", b"}\n\n"),
    ],
)
def test_a_stream_that_takes_too_long(path: str, start: bytes, end: bytes) -> None:
    ended: list[str] = []
    messages = asyncio.run(run_deadline(slow_stream(ended, b"text/event-stream; charset=utf-8"), 0.05, path))
    assert ended == ["closed"] and len(messages) == 3
    last = messages[-1]
    assert not last["more_body"] and last["body"].startswith(start) and last["body"].endswith(end)
    assert b"--request-timeout" in last["body"]


def test_another_body_that_takes_too_long_is_cut_off() -> None:
    """Nothing that could be taken for its end may follow."""
    messages = asyncio.run(run_deadline(slow_stream([], b"application/json"), 0.05))
    assert len(messages) == 2 and messages[-1]["more_body"]


def test_a_client_that_does_not_read_cannot_hold_a_request() -> None:
    async def main() -> float:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

        async def never(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        began = time.monotonic()
        async with asyncio.timeout(5):
            await Deadline(app, 0.05)(scope_of("POST", "/v1/x", []), nothing_more(), never)
        return time.monotonic() - began

    assert asyncio.run(main()) < 2


def test_a_fast_answer_and_a_fault_pass() -> None:
    assert [m["type"] for m in asyncio.run(run_deadline(Inner(), 5))] == ["http.response.start", "http.response.body"]

    async def own_timeout(_: Scope) -> None:
        raise TimeoutError("something of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        asyncio.run(run_deadline(Inner(own_timeout), 5))


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--requests-per-minute", "0"], "--requests-per-minute"),
        (["--tokens-per-minute", "x"], "--tokens-per-minute"),
        (["--max-concurrent", "-1"], "--max-concurrent"),
        (["--max-queue", "0"], "--max-queue"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--request-timeout", "nan"], "--request-timeout"),
        (["--request-timeout", "inf"], "--request-timeout"),
    ],
)
def test_wrong_settings(argv: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load(argv)


def test_settings_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "atlas.toml"
    file.write_text('request_timeout = 30\nmax_queue = 5\nallowed_host = ["a.lan", "b.lan"]\ntokens_per_minute = 9\n')
    config = load(["--config", str(file), "--cors-origin", "https://a", "--cors-origin", "https://b"]).config
    assert (config.request_timeout, config.max_queue, config.tokens_per_minute) == (30.0, 5, 9)
    assert (config.allowed_host, config.cors_origin) == (("a.lan", "b.lan"), ("https://a", "https://b"))


# ---- the server ----------------------------------------------------------------------------------


def keyed(server: RunningServer, key: str = "sk-one") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=10)


def test_limits_of_a_server(start: Start) -> None:
    flags = ("--api-key", "sk-one", "--api-key", "sk-two", "--tokens-per-minute", "60", "--max-concurrent", "2")
    server = start(*flags).wait_ready()
    one, two = keyed(server), keyed(server, "sk-two")
    streams = [one.chat.completions.create(model="tiny", **YO, seed=3, stream=True) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="2 requests of this API key") as error:
        one.chat.completions.create(model="tiny", **YO)
    assert error.value.code == "concurrency_limit_exceeded" and int(error.value.response.headers["retry-after"]) > 0
    assert two.chat.completions.create(model="tiny", **YO).choices[0].message.content == ANSWER
    for stream in streams:
        stream.close()

    # Those who went away are not counted, but what was made for them is paid for.
    def answers() -> openai.APIStatusError | None:
        try:
            one.chat.completions.create(model="tiny", **YO)
        except openai.RateLimitError as refusal:
            return refusal if refusal.code == "rate_limit_exceeded" else None
        return None

    found = eventually(answers)
    assert "tokens; accepted: 60 per minute" in str(found)


def test_usage_is_what_is_paid(start: Start) -> None:
    server = start("--tokens-per-minute", "600").wait_ready()
    began, paid = time.monotonic(), 0

    def check(response: Any, total: int) -> None:
        nonlocal paid
        paid += total
        left = int(response.headers["x-ratelimit-remaining-tokens"])
        refilled = 10 * (time.monotonic() - began)
        assert 600 - paid <= left <= min(600, 600 - paid + refilled)

    answer = server.http.post(CHAT, json={**YO, "n": 3})
    check(answer, answer.json()["usage"]["total_tokens"])
    body = {**YO, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    lines = server.http.post(CHAT, json=body).text.split("\n\n")
    streamed = json.loads(lines[-3].removeprefix("data: "))["usage"]["total_tokens"]
    last = server.http.post(CHAT, json={**YO, "max_tokens": 1})
    check(last, streamed + last.json()["usage"]["total_tokens"])
    assert paid > 60


def test_a_full_queue(start: Start) -> None:
    behaviours = {"7": behaviour("late", delay=0.6), "3": behaviour("slow ", end=None, delay=0.05)}
    server = start("--max-queue", "2", behaviours=behaviours).wait_ready()
    running = server.openai().chat.completions.create(model="tiny", **YO, seed=3, stream=True)
    parts = iter(running)
    while not next(parts).choices[0].delta.content:
        pass  # it has its first token and waits no more

    waiting = [server.openai().chat.completions.create(model="tiny", **YO, seed=7, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="2 sequences wait") as error:
        server.openai().chat.completions.create(model="tiny", **YO)
    assert error.value.code == "queue_full" and int(error.value.response.headers["retry-after"]) > 0
    for stream in waiting:
        assert "".join(part.choices[0].delta.content or "" for part in stream) == "late"
    assert server.openai().chat.completions.create(model="tiny", **YO).choices[0].message.content == ANSWER
    running.close()


def test_the_time_limit_of_a_server(start: Start) -> None:
    server = start("--request-timeout", "0.7").wait_ready()
    answer = server.http.post(CHAT, json={**YO, "seed": 3})
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "request_timed_out"
    stream = server.http.post(CHAT, json={**YO, "seed": 3, "stream": True})
    lines = stream.text.split("\n\n")
    assert stream.status_code == 200 and lines[-2:] == ["data: [DONE]", ""]
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "request_timed_out"
    # The engine was told to stop, both times.
    eventually(lambda: len([event for event in server.events("abort") if event["known"]]) == 2)
    # A body that does not come counts too.
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as half:
        headers = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 99"
        half.sendall(f"POST {CHAT} HTTP/1.1\r\n{headers}\r\n\r\n{{".encode())
        assert half.recv(1 << 16).startswith(b"HTTP/1.1 504")
    assert server.http.post(CHAT, json=YO).json()["choices"][0]["message"]["content"] == ANSWER
