"""Streams through the official `openai` client: the same answer in parts, its helpers, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.clients.asking import CAPITAL, EMOJI, GREEDY, SAMPLED, STORY, TURNS, Gathered
from tests.serve.real_server import MODEL, RealServer

ENDLESS: Any = {"model": MODEL, "temperature": 0, "max_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize("messages", [CAPITAL, STORY, EMOJI, TURNS], ids=["capital", "story", "emoji", "turns"])
def test_a_stream_is_the_whole_answer(client: openai.OpenAI, messages: Any) -> None:
    options = {**GREEDY, "max_tokens": 24, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(messages=messages, **options)
    whole = answer.choices[0]
    got = Gathered(client.chat.completions.create(messages=messages, stream=True, **options))
    assert (got.text, got.finish) == ({0: whole.message.content}, {0: whole.finish_reason})
    assert got.logprobs == {0: whole.logprobs.content}
    assert got.roles == {0: ["assistant"]}
    (frame,) = got.frames
    assert frame[1:] == ("chat.completion.chunk", frame[2], answer.model, answer.system_fingerprint)
    assert got.usage is None


def test_usage_comes_last_if_asked_for(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CAPITAL, **GREEDY).usage
    chunks = list(
        client.chat.completions.create(messages=CAPITAL, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert [chunk.usage for chunk in chunks] == [None] * (len(chunks) - 1) + [whole]
    assert chunks[-1].choices == []


def test_choices_of_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    options = {**SAMPLED, "n": 3, "seed": 11}
    whole = client.chat.completions.create(messages=STORY, **options)
    got = Gathered(client.chat.completions.create(messages=STORY, stream=True, **options))
    assert got.text == {choice.index: choice.message.content for choice in whole.choices}
    assert got.finish == {choice.index: choice.finish_reason for choice in whole.choices}
    assert got.roles == {index: ["assistant"] for index in range(3)}


def test_a_stop_string_in_a_stream(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(messages=STORY, **GREEDY).choices[0].message.content
    stop = text[len(text) // 2 :][:7]
    got = Gathered(client.chat.completions.create(messages=STORY, stream=True, stop=["§", stop], **GREEDY))
    assert (got.text[0], got.finish[0]) == (text[: text.index(stop)], "stop")


def test_the_events_of_the_stream_helper(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CAPITAL, **GREEDY)
    with client.chat.completions.stream(messages=CAPITAL, logprobs=True, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    deltas = [event for event in events if event.type == "content.delta"]
    assert "".join(event.delta for event in deltas) == whole.choices[0].message.content
    assert deltas[-1].snapshot == whole.choices[0].message.content
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.content == whole.choices[0].message.content
    assert {"chunk", "logprobs.content.delta", "logprobs.content.done"} <= {event.type for event in events}


def test_the_stream_helper_says_that_an_answer_was_cut(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=STORY, **GREEDY) as stream:
        assert len([event for event in stream if event.type == "content.delta"]) > 1
        with pytest.raises(openai.LengthFinishReasonError):
            stream.get_final_completion()


def test_the_bytes_of_a_stream(client: openai.OpenAI) -> None:
    """Server-sent events, each one line of strict JSON, and the last says that it is the last."""
    with client.chat.completions.with_streaming_response.create(messages=EMOJI, stream=True, **GREEDY) as raw:
        lines = list(raw.iter_lines())
        headers = raw.headers
    assert headers["content-type"].startswith("text/event-stream") and headers["x-request-id"]
    assert headers["cache-control"] == "no-cache"
    events = [line for line in lines if line]
    assert all(line.startswith("data: ") for line in events) and events[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: "), parse_constant=pytest.fail) for line in events[:-1]]
    assert "\ufffd" not in "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] in ("stop", "length")


def test_the_asynchronous_client_says_the_same(server: RealServer, client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(messages=STORY, **GREEDY).choices[0].message.content

    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(messages=STORY, **GREEDY)
            stream = await client.chat.completions.create(messages=STORY, stream=True, **GREEDY)
            got = Gathered([chunk async for chunk in stream])
            return whole.choices[0].message.content, got.text[0]

    assert asyncio.run(ask()) == (expected, expected)


def test_many_at_once_say_what_each_says_alone(server: RealServer, client: openai.OpenAI) -> None:
    """More than run at once, of all kinds: some wait, and each gets its own answer."""
    kinds = [
        (messages, options) for messages in (CAPITAL, STORY, TURNS) for options in (GREEDY, {**SAMPLED, "seed": 3})
    ]
    alone = [
        client.chat.completions.create(messages=messages, **options).choices[0].message.content
        for messages, options in kinds
    ]

    async def one(client: openai.AsyncOpenAI, position: int) -> str:
        messages, options = kinds[position % len(kinds)]
        stream = await client.chat.completions.create(messages=messages, stream=True, **options)
        return Gathered([chunk async for chunk in stream]).text[0]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, position) for position in range(14)))

    assert asyncio.run(all_of_them()) == (alone * 3)[:14]


def _runs(server: RealServer, least: int = 1) -> bool:
    running: int = server.info()["engine"]["running"]
    return running >= least


def test_closing_a_stream_frees_its_sequence(server: RealServer, client: openai.OpenAI) -> None:
    free = server.idle()["free_blocks"]
    with client.chat.completions.create(messages=STORY, stream=True, **ENDLESS) as stream:
        for _, _ in zip(range(4), stream, strict=False):
            pass
        assert _runs(server)
    # It would have gone on for 900 tokens, which is many seconds.
    assert server.idle(5)["free_blocks"] == free


def test_cancelling_a_task_frees_its_sequence(server: RealServer) -> None:
    server.idle()

    async def cancel() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            tasks = [
                asyncio.create_task(client.chat.completions.create(messages=STORY, **ENDLESS)),
                asyncio.create_task(client.chat.completions.create(messages=STORY, n=2, **ENDLESS)),
            ]
            while not await asyncio.to_thread(_runs, server, 3):
                await asyncio.sleep(0.02)
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True)
            )

    asyncio.run(cancel())
    server.idle(5)


def test_a_timeout_of_the_client_frees_the_sequence(server: RealServer, client: openai.OpenAI) -> None:
    server.idle()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(messages=STORY, **ENDLESS)
    server.idle(5)


def test_a_reader_that_is_slow_loses_nothing(server: RealServer, client: openai.OpenAI) -> None:
    """And another client is not kept waiting."""
    options = {**GREEDY, "max_tokens": 40}
    expected = client.chat.completions.create(messages=STORY, **options).choices[0].message.content
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json={"messages": STORY, "stream": True, **options}, timeout=60
    ) as slow:
        answer = client.chat.completions.create(messages=CAPITAL, **GREEDY)
        assert "Paris" in answer.choices[0].message.content
        server.idle()
        lines = [line.removeprefix("data: ") for line in slow.iter_lines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]) == expected
