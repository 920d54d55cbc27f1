"""Every event of a response's stream has its number, errors too, whoever words them; each is one of the official
client's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai.types.responses as sdk
import pytest
from asgi import nothing_more, scope_of
from pydantic import TypeAdapter
from starlette.types import Message, Receive, Scope, Send

from atlas.serve.access.limits import Deadline
from atlas.serve.errors import ApiError
from atlas.serve.http import EventStream
from atlas.serve.openai import responses_background
from atlas.serve.openai.responses_background import EventLog
from atlas.serve.openai.responses_making import Making
from atlas.serve.openai.responses_writer import ResponseWriter
from tests.serve.in_process import Server, make_model

EVENTS: TypeAdapter[Any] = TypeAdapter(sdk.ResponseStreamEvent)


def checked(text: str, first: int = 0) -> list[Any]:
    """The events of a stream, numbered from `first` on, as the official client's types."""
    found = []
    for number, frame in enumerate(text.removesuffix("\n\n").split("\n\n"), start=first):
        name, data = frame.split("\ndata: ")
        event = EVENTS.validate_json(data, strict=True)
        assert name == f"event: {event.type}" and event.sequence_number == number
        found.append(event)
    return found


def _streamed(model: Path) -> str:
    server = Server(model)
    server.say_text(1, "Hello")
    return asyncio.run(server.post("/v1/responses", input="x", seed=1, stream=True)).text


def test_a_fault_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, add = make_model(tmp_path / "m"), ResponseWriter.add

    def broken(self: ResponseWriter, events: Any, logprobs: Any = ()) -> Any:
        if self._number > 6:
            raise RuntimeError("no")
        return add(self, events, logprobs)

    monkeypatch.setattr(ResponseWriter, "add", broken)
    *_, delta, last = checked(_streamed(model))
    assert delta.type == "response.output_text.delta" and last.type == "response.failed"
    assert last.response.error.code == "server_error" and last.response.output_text
    # And where even that cannot be told.
    monkeypatch.setattr(Making, "fault", broken)
    *_, delta, last = checked(_streamed(model))
    assert (delta.type, last.type, last.code) == ("response.output_text.delta", "error", "internal_error")


async def _sent(app: Any, path: str = "/v1/responses") -> str:
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    await app(scope_of("POST", path, []), nothing_more(), send)
    return b"".join(sent).decode()


def _event(number: int) -> bytes:
    data = json.dumps({"type": "response.output_text.delta", "sequence_number": number, "delta": "a\n\nb", **PLACE})
    return b"event: response.output_text.delta\ndata: " + data.encode() + b"\n\n"


PLACE = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("how", ["raises", "time is over"])
def test_whatever_breaks_the_stream(first: int, how: str) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield _event(first) + _event(first + 1)
        yield _event(first + 2)
        if how == "raises":
            raise ApiError(400, "events_not_kept", "gone", "starting_after")
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events(), {}, end=b"", first_event=first)(scope, receive, send)

    *_, last = checked(asyncio.run(_sent(Deadline(app, 0.05))), first)
    assert last.code == ("events_not_kept" if how == "raises" else "request_timed_out")
    assert last.sequence_number == first + 3


def test_who_falls_behind_the_events_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_background, "MAX_LOG", 600)

    async def main() -> str:
        log = EventLog()
        log.add(map(_event, range(2)))
        log.tell()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def slow(message: Message) -> None:
                await send(message)
                if message.get("body"):
                    log.add(map(_event, range(2, 20)))
                    log.tell(last=True)

            await EventStream(log.follow(-1), {}, end=b"", first_event=0)(scope, receive, slow)

        return await _sent(app)

    *_, last = checked(asyncio.run(main()))
    assert (last.type, last.code, last.sequence_number) == ("error", "events_not_kept", 2)
