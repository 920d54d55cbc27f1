"""/v1/responses: a small request that stands for much is bounded as a large one, and worked on in a thread."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import Message

from atlas.serve.access import limits
from atlas.serve.access.preparation import Preparation
from atlas.serve.openai import responses, responses_making
from atlas.serve.openai.responses_conversation import Conversation
from atlas.serve.openai.responses_items import FunctionCallItem, Item, MessageItem, ReasoningItem, ReasoningText
from tests.serve.asgi import scope_of
from tests.serve.in_process import Server, make_model

PATH = "/v1/responses"
LARGE = "x" * 50_000


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return make_server(tmp_path)


def make_server(tmp_path: Path) -> Server:
    server = Server(make_model(tmp_path / "model"))
    server.engine.answers = defaultdict(lambda: [[100, 3]])
    serving = server.service.require()
    ready = msgspec.structs.replace(serving.ready, max_context=10_000_000)
    server.service.serving = msgspec.structs.replace(serving, ready=ready)
    return server


async def store(server: Server, text: str = LARGE, **more: Any) -> tuple[str, str]:
    """The id of a stored response, and that of its input item."""
    answer = await server.post(PATH, input=text, **more)
    assert answer.status_code == 200, answer.text
    name = answer.json()["id"]
    return name, (await server.http.get(f"{PATH}/{name}/input_items")).json()["data"][0]["id"]


def reference(item: str, times: int = 1) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": item}] * times


def refused(answer: httpx.Response, where: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (413, "request_too_large", where), answer.text


def test_many_names_of_one_large_item(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        _, item = await store(server)
        assert (await server.post(PATH, input=reference(item))).status_code == 200
        monkeypatch.setattr(responses, "MAX_BODY", 200_000)
        assert (await server.post(PATH, input=reference(item))).status_code == 200
        refused(await server.post(PATH, input=reference(item, 5)), "input[3]")

    asyncio.run(main())


def test_names_in_many_large_responses(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        items = [reference((await store(server))[1])[0] for _ in range(4)]
        monkeypatch.setattr(responses, "MAX_BODY", 190_000)
        monkeypatch.setattr(responses, "_items", None)  # none is looked into
        refused(await server.post(PATH, input=items), "input")

    asyncio.run(main())


def test_a_long_chain(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(responses, "MAX_BODY", 100_000)
        previous: dict[str, str] = {}
        for _ in range(2):
            name, _ = await store(server, LARGE[:30_000], **previous)
            previous = {"previous_response_id": name}
        answer = await server.post(PATH, input=LARGE, truncation="auto", **previous)
        refused(answer, "previous_response_id")

    asyncio.run(main())


def in_which_threads(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> set[bool]:
    """Whether this function is called in the main thread, by each call."""
    function, seen = getattr(place, name), set[bool]()

    def watched(*args: Any) -> Any:
        seen.add(threading.current_thread() is threading.main_thread())
        return function(*args)

    monkeypatch.setattr(place, name, watched)
    return seen


def test_items_are_looked_into_in_a_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        _, item = await store(server)
        seen = in_which_threads(monkeypatch, responses, "_items")
        assert (await server.post(PATH, input=reference(item))).status_code == 200
        assert seen == {False}

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_polls_stalls_nobody(server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """What a response repeats of its request is worded in a thread, at its beginning and whenever it is asked for;
    the request's items are worded once."""

    async def main() -> None:
        server.engine.delay = 1000.0

        class Encoder:
            count = 0

            @staticmethod
            def encode(value: Any) -> bytes:
                assert threading.current_thread() is not threading.main_thread()
                Encoder.count += isinstance(value, list)
                return encode(value)

        encode = responses_making._encoder.encode
        monkeypatch.setattr(responses_making, "_encoder", Encoder)
        body = {"input": LARGE, "instructions": 20 * LARGE, "background": True}
        if stream:
            task = asyncio.create_task(server.post(PATH, stream=True, **body))
            for _ in range(500):
                await asyncio.sleep(0.01)
                if server.service.background._runs:
                    break
            ((_, name),) = server.service.background._runs
        else:
            name = (await server.post(PATH, **body)).json()["id"]
        for _ in range(3):
            polled = (await server.http.get(f"{PATH}/{name}")).json()
            assert polled["status"] in ("queued", "in_progress") and polled["instructions"] == 20 * LARGE
        assert Encoder.count == 1
        assert (await server.post(f"{PATH}/{name}/cancel")).json()["status"] == "cancelled"
        if stream:
            assert (await task).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("what", ["", "/input_items", "?stream=true"])
def test_whoever_does_not_read_large_answers_gets_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each is copied on its way, for a minute where nothing is taken."""
    preparation = Preparation(100, 5 * len(LARGE))
    monkeypatch.setattr(limits, "Preparation", lambda: preparation)
    server = make_server(tmp_path)

    async def main() -> None:
        answer = await server.post(PATH, input="hi", instructions=LARGE, background=True, stream=True)
        name = re.findall(r"resp_\w+", answer.text)[0]
        if what == "/input_items":
            name = (await store(server, LARGE))[0]
        reading = asyncio.Event()
        path, _, query = what.partition("?")
        scope = scope_of("GET", f"{PATH}/{name}{path}", [("host", "localhost")])

        async def ask() -> int:
            status = 0

            async def send(message: Message) -> None:
                nonlocal status
                status = status or message["status"]
                if status == 200 and message.get("body"):
                    await reading.wait()

            async def receive() -> Message:
                await asyncio.Event().wait()
                raise AssertionError

            app: Any = server.http._transport.app  # type: ignore[attr-defined]
            await app({**scope, "query_string": query.encode()}, receive, send)
            return status

        tasks = [asyncio.create_task(ask()) for _ in range(4)]
        done, _ = await asyncio.wait(tasks, timeout=0.3)
        assert [task.result() for task in done] == [429, 429]
        assert (await server.http.get(f"{PATH}/{name}")).status_code == 200  # who is at another address
        reading.set()
        assert sorted([await task for task in tasks]) == [200, 200, 429, 429]
        assert await ask() == 200
        assert (preparation.requests, preparation.bytes) == ({}, {})

    asyncio.run(main())


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.parametrize("kind", ["content", "reasoning"])
def test_a_turn_of_many_items_is_joined_once(kind: str) -> None:
    text = "x" * 500
    more: Item = MessageItem(role="assistant", content=text)
    if kind == "reasoning":
        more = ReasoningItem(summary=[], content=[ReasoningText(text)])

    def converse(count: int) -> Conversation:
        conversation = Conversation()
        conversation.extend([FunctionCallItem(call_id="c", name="f", arguments="{}"), *[more] * count], "input")
        return conversation

    (message,) = converse(7).messages
    assert (message.content if kind == "content" else message.reasoning_content) == text * 7
    assert min(seconds(lambda: converse(16_000)) for _ in range(2)) < 0.02 + 24 * min(
        seconds(lambda: converse(2_000)) for _ in range(3)
    )


def test_turns_go_on_from_one_response_to_the_next() -> None:
    conversation = Conversation()
    call = FunctionCallItem(call_id="c", name="f", arguments="{}")
    for items in (
        [call],
        [MessageItem(role="assistant", content="a")],
        [MessageItem(role="assistant", content="b"), MessageItem(role="user", content="u")],
        [MessageItem(role="assistant", content="")],
        [MessageItem(role="assistant", content="c"), ReasoningItem(summary=[], content=[ReasoningText("r")])],
    ):
        conversation.extend(items, "input")
    found = [(one.role, one.content, one.reasoning_content) for one in conversation.messages]
    assert found == [
        ("assistant", "ab", None),
        ("user", "u", None),
        ("assistant", "", None),
        ("assistant", "c", None),
        ("assistant", None, "r"),
    ]
