"""Responses in the background: they go on without their request, can be read, followed, and stopped."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serve_harness import ANSWER, RunningServer, Start, behaviour, eventually

from atlas.serve.errors import ApiError
from atlas.serve.openai import responses_background
from atlas.serve.openai.responses_background import EventLog
from tests.serve.in_process import Server, make_model


@pytest.fixture
def client(shared: RunningServer) -> openai.OpenAI:
    return shared.openai()


def begin(client: openai.OpenAI, seed: int = 3, **options: Any) -> Any:
    """seed 3: slow, and without an end of its own."""
    return client.responses.create(input="x", background=True, extra_body={"seed": seed}, **options)


def ended(client: openai.OpenAI, response_id: str) -> Any:
    def look() -> Any:
        response = client.responses.retrieve(response_id)
        return response if response.status not in ("queued", "in_progress") else None

    return eventually(look)


def test_it_is_there_at_once_and_done_later(client: openai.OpenAI) -> None:
    opening = begin(client, max_output_tokens=10)
    assert (opening.status, opening.output, opening.usage, opening.background) == ("queued", [], None, True)
    assert client.responses.retrieve(opening.id).status == "in_progress"
    listed = client.responses.input_items.list(opening.id)
    assert [item.content[0].text for item in listed] == ["x"]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="y", previous_response_id=opening.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_in_progress", "previous_response_id")
    final = ended(client, opening.id)
    assert (final.status, final.output_text, final.usage.output_tokens) == ("incomplete", "slow slow ", 10)
    assert client.responses.cancel(opening.id).status == "incomplete"  # it has come to its end
    assert client.responses.create(input="y", previous_response_id=opening.id).output_text == ANSWER


def test_cancelled_it_stops_and_stays_so(shared: RunningServer, client: openai.OpenAI) -> None:
    aborted = len(shared.events("abort"))
    opening = begin(client)
    eventually(lambda: [one for one in shared.events("submit") if one["sampling"]["seed"] == 3])
    time.sleep(0.3)
    for _ in range(2):
        stopped = client.responses.cancel(opening.id)
        assert stopped.status == "cancelled"
    assert client.responses.retrieve(opening.id).to_dict() == stopped.to_dict()
    assert stopped.output_text.startswith("s") and stopped.output[0].status == "incomplete"
    eventually(lambda: len(shared.events("abort")) == aborted + 1)


def test_metrics_tell_what_is_kept_and_what_is_made(shared: RunningServer, client: openai.OpenAI) -> None:
    def told() -> dict[str, float]:
        lines = shared.http.get("/metrics").text.splitlines()
        names = ("stored_responses", "stored_responses_bytes", "background_responses")
        return {name: float(line.split()[-1]) for line in lines for name in names if f":{name}{{" in line}

    before = told()
    opening = begin(client)
    during = told()
    assert during["background_responses"] == before["background_responses"] + 1
    client.responses.cancel(opening.id)
    after = told()
    assert after["background_responses"] == before["background_responses"]
    assert after["stored_responses"] == before["stored_responses"] + 1
    assert after["stored_responses_bytes"] > before["stored_responses_bytes"] + 500


def test_only_what_is_in_the_background_can_be_cancelled(client: openai.OpenAI) -> None:
    answer = client.responses.create(input="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.cancel(answer.id)
    assert (caught.value.code, caught.value.param) == ("not_in_background", "response_id")
    assert client.responses.retrieve(answer.id).status == "completed"


def test_deleted_it_stops(shared: RunningServer, client: openai.OpenAI) -> None:
    aborted = len(shared.events("abort"))
    opening = begin(client)
    eventually(lambda: client.responses.retrieve(opening.id).status == "in_progress")
    time.sleep(0.1)
    client.responses.delete(opening.id)
    eventually(lambda: len(shared.events("abort")) == aborted + 1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(opening.id)


def test_one_that_breaks_is_failed(client: openai.OpenAI) -> None:
    final = ended(client, begin(client, seed=4).id)
    assert (final.status, final.error.code) == ("failed", "server_error")
    assert "not finite" in final.error.message


def test_its_events_can_be_followed_from_anywhere(client: openai.OpenAI) -> None:
    whole = begin(client, stream=True, max_output_tokens=12)
    first = next(iter(whole))
    whole.close()  # who asked goes away: it goes on
    assert first.type == "response.created"
    events = list(client.responses.retrieve(first.response.id, stream=True))  # while it is made
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert final.output_text == "slow slow sl" and final.status == "incomplete"
    assert client.responses.retrieve(first.response.id).to_dict() == final.to_dict()
    for after in (0, 5, len(events) - 2, len(events) - 1, len(events) + 9):  # and when it is done
        later = list(client.responses.retrieve(first.response.id, stream=True, starting_after=after))
        assert [event.to_dict() for event in later] == [event.to_dict() for event in events[after + 1 :]]


def test_the_stream_helper_follows_too(client: openai.OpenAI) -> None:
    events = list(begin(client, seed=1, stream=True))
    with client.responses.stream(response_id=events[0].response.id, starting_after=4) as stream:
        seen = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in seen] == list(range(5, len(events)))
    assert final.output_text == "abcDEFGHIJklm" and final.status == "completed"


def test_who_follows_one_that_is_cancelled_reads_its_end(client: openai.OpenAI) -> None:
    stream = begin(client, stream=True)
    events = iter(stream)
    response_id = next(events).response.id
    eventually(lambda: next(events).type == "response.output_text.delta")
    client.responses.cancel(response_id)
    *_, last = events
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")


def test_only_what_was_made_as_a_stream_can_be_followed(client: openai.OpenAI) -> None:
    running, answer = begin(client), client.responses.create(input="x", stream=False)
    for response_id in (running.id, answer.id):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.retrieve(response_id, stream=True)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "stream")
    client.responses.cancel(running.id)


@pytest.fixture
def small_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(responses_background, "MAX_LOG", 100)
    yield


def test_a_log_keeps_its_latest_events(small_log: None) -> None:
    async def main() -> None:
        log = EventLog()
        log.add(b"%09d\n" % number for number in range(50))
        log.tell(last=True)
        assert (log.first, len(log.events)) == (40, 10)
        assert b"".join([one async for one in log.follow(46)]) == b"000000047\n000000048\n000000049\n"
        assert [one async for one in log.follow(49)] == []
        with pytest.raises(ApiError) as caught:
            [one async for one in log.follow(38)]
        assert (caught.value.body.code, caught.value.body.param) == ("events_not_kept", "starting_after")
        assert len(b"".join([one async for one in log.follow(39)])) == 100

    asyncio.run(main())


def test_limits_hold_in_the_background_too(start: Start) -> None:
    server = start("--max-concurrent", "1", "--request-timeout", "0.6", "--tokens-per-minute", "100000").wait_ready()
    client = server.openai()
    opening = begin(client)
    with pytest.raises(openai.RateLimitError) as caught:
        client.responses.create(input="x")
    assert caught.value.code == "concurrency_limit_exceeded"
    final = ended(client, opening.id)
    assert final.status == "failed" and "0.6 s" in final.error.message
    assert client.responses.create(input="x").output_text == ANSWER


def test_a_shutdown_waits_for_it(start: Start) -> None:
    server = start(default=behaviour("slow ", end=None, delay=0.05)).wait_ready()
    begin(server.openai(), max_output_tokens=25)  # 1.25 s
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    assert time.monotonic() - began > 1
    assert "finishing 1 request (at most 30 s; a second Ctrl-C ends at once)" in server.output.read_text()


def test_an_engine_that_dies_takes_no_stored_response_with_it(start: Start) -> None:
    dying = behaviour("dying ", end=None, delay=0.05, die_after=5)
    server = start(behaviours={"1": behaviour("plain"), "8": dying, "3": behaviour("slow ", end=None, delay=0.05)})
    client = server.wait_ready().openai()
    first = client.responses.create(input="x", extra_body={"seed": 1})
    running = begin(client)
    events = list(client.responses.create(input="x", stream=True, extra_body={"seed": 8}))
    last: Any = events[-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()
    assert ended(client, running.id).status == "failed"
    eventually(lambda: server.health() == 200, 20)  # it is started again
    again = client.responses.create(input="y", previous_response_id=first.id, extra_body={"seed": 1})
    assert again.output_text == first.output_text == "plain"


def test_as_the_client_for_node_cancels(shared: RunningServer, client: openai.OpenAI) -> None:
    """Without a body, and so without a Content-Type."""
    opening = begin(client)
    request = shared.http.build_request("POST", f"/v1/responses/{opening.id}/cancel")
    assert "content-type" not in request.headers
    answer = shared.http.send(request)
    assert answer.status_code == 200 and answer.json()["status"] == "cancelled", answer.text


def test_events_that_are_gone_are_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said with the status, and not in a stream that has begun with 200."""
    monkeypatch.setattr(responses_background, "MAX_LOG", 3000)
    server = Server(make_model(tmp_path / "model"))
    server.say_text(1, "a long answer " * 20)

    async def main() -> None:
        opening = (await server.post("/v1/responses", input="x", background=True, stream=True, seed=1)).text
        created = json.loads(opening.split("data: ")[1].splitlines()[0])
        path = f"/v1/responses/{created['response']['id']}"
        gone = await server.http.get(path, params={"stream": "true", "starting_after": "0"})
        error = gone.json()["error"]
        assert (gone.status_code, error["code"], error["param"]) == (400, "events_not_kept", "starting_after")
        first = int(error["message"].split("number ")[1].split()[0])
        kept = await server.http.get(path, params={"stream": "true", "starting_after": str(first - 1)})
        assert kept.status_code == 200 and f'"sequence_number":{first}' in kept.text

    asyncio.run(main())
