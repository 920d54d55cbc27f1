"""Chat over the official client, on the engine that says what it was told to."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from serve_harness import ANSWER, CHAT_TEMPLATE, RunningServer, Start, eventually, ids_of, make_checkpoint

YO = [{"role": "user", "content": "yo"}]


def ask(server: RunningServer, **fields: Any) -> Any:
    return server.openai().chat.completions.create(**{"model": "tiny", "messages": YO, **fields})


def stream(server: RunningServer, **fields: Any) -> list[Any]:
    return list(ask(server, stream=True, **fields))


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def last_prompt(server: RunningServer) -> list[int]:
    prompt: list[int] = server.events("submit")[-1]["prompt"]
    return prompt


def last_sampling(server: RunningServer) -> dict[str, Any]:
    sampling: dict[str, Any] = server.events("submit")[-1]["sampling"]
    return sampling


def test_an_answer(shared: RunningServer) -> None:
    answer = ask(shared)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (
        ANSWER,
        "assistant",
        "stop",
    )
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == len(ANSWER.encode()) + 1  # the end counts
    assert answer.usage.total_tokens == 6 + answer.usage.completion_tokens
    assert answer.model == "tiny" and answer.object == "chat.completion"
    assert last_prompt(shared) == [1, 4, *ids_of("yo"), 3, 5]  # one BOS


def test_a_stream(shared: RunningServer) -> None:
    chunks = stream(shared, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert text_of(chunks) == ANSWER
    assert not any("\ufffd" in (c.choices[0].delta.content or "") for c in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(ANSWER.encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_raw_events(shared: RunningServer) -> None:
    body = {"messages": YO, "stream": True}
    with shared.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all("usage" not in event for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": None}


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("DEFGHIJ", "abc"),
        ("EFX", "abcDEFGHIJklm"),
        ("m", "abcDEFGHIJkl"),
        ("lmX", "abcDEFGHIJklm"),
        ("a", ""),
        (["GHI", "DE"], "abc"),
        ("DEFGHIJklmn", "abcDEFGHIJklm"),
    ],
)
@pytest.mark.parametrize("seed", [1, 6])  # tokens one by one, and five at a time
def test_stop_strings(shared: RunningServer, stop: Any, expected: str, seed: int) -> None:
    whole = ask(shared, stop=stop, seed=seed)
    chunks = stream(shared, stop=stop, seed=seed, stream_options={"include_usage": True})
    assert whole.choices[0].message.content == text_of(chunks) == expected
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "stop"
    assert whole.usage == chunks[-1].usage


def test_a_stop_string_aborts_the_sequence(shared: RunningServer) -> None:
    before = len(shared.events("abort"))
    assert ask(shared, seed=3, stop="w s").choices[0].message.content == "slo"
    assert eventually(lambda: shared.events("abort")[before:])[-1]["known"]


def test_max_tokens(shared: RunningServer) -> None:
    answer = ask(shared, seed=2, max_tokens=4)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("uvwx", "length")
    assert answer.usage.completion_tokens == 4
    assert ask(shared, seed=2, max_completion_tokens=1).choices[0].message.content == "u"


@pytest.mark.parametrize("tokens", [4, 5, 6])  # the cut goes through the emoji
def test_max_tokens_inside_a_character(shared: RunningServer, tokens: int) -> None:
    whole = ask(shared, max_tokens=tokens).choices[0].message.content
    assert whole == text_of(stream(shared, max_tokens=tokens))
    assert whole in ("Hi ", "Hi \ufffd")


def test_max_tokens_that_do_not_fit(shared: RunningServer) -> None:
    for value in (10**18, 1e18, 2**31 - 1, 507):
        body = {"messages": YO, "seed": 2, "max_tokens": value}
        response = shared.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        assert response.headers["x-atlas-max-tokens"] == "506"
        assert response.json()["usage"]["completion_tokens"] == 506
    body = {"messages": YO, "seed": 2, "max_tokens": 506}
    assert "x-atlas-max-tokens" not in shared.http.post("/v1/chat/completions", json=body).headers
    assert ask(shared, seed=2).usage.completion_tokens == 506  # null: the rest of the context


def test_sampling_reaches_the_engine(shared: RunningServer) -> None:
    ask(
        shared,
        seed=7,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"76": 100, "5": -2.5},
        logprobs=True,
        top_logprobs=3,
        extra_body={
            "top_k": 3,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "prompt_logprobs": 4,
            "priority": 3,
        },
    )
    expected = {"max_tokens": 506, "temperature": 0.25, "top_k": 3, "top_p": 0.5, "seed": 7, "min_p": 0.1}
    expected |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -1.0, "min_tokens": 2}
    expected |= {"logprobs": 3, "prompt_logprobs": 4, "logit_bias": {"76": 100.0, "5": -2.5}}
    expected |= {"grammar": None, "thinking": None, "priority": 3, "pooling": None}
    assert last_sampling(shared) == {**expected, "stop_token_ids": [9]}
    ask(shared, extra_body={"stop_token_ids": [9]})
    assert last_sampling(shared)["stop_token_ids"] == [2, 3, 9]


def test_defaults_are_the_models(shared: RunningServer) -> None:
    ask(shared)
    first = last_sampling(shared)
    ask(shared)
    assert (first["temperature"], first["top_p"], first["top_k"]) == (0.5, 1.0, 20)
    assert first["seed"] != last_sampling(shared)["seed"]
    assert "temperature 0.5 (model default" in shared.output.read_text()


def test_top_k_spellings_of_all(shared: RunningServer) -> None:
    for value, expected in ((-1, 0), (0, 0), (100000, 320)):
        ask(shared, extra_body={"top_k": value})
        assert last_sampling(shared)["top_k"] == expected


def test_an_id_without_text_is_counted(shared: RunningServer) -> None:
    answer = ask(shared, seed=5)
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("okyes", 7)


def test_a_stop_token_is_counted_but_not_shown(shared: RunningServer) -> None:
    answer = ask(shared, seed=1, extra_body={"stop_token_ids": ids_of("D")})
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("abc", 4)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("content", ["<|eot|>", "a<|assistant|>b", "</s>", "<s>", "<|eo", "t|>", "user"])
def test_special_tokens_in_content_stay_text(shared: RunningServer, content: str) -> None:
    messages = [{"role": "user", "content": content}]
    answer = ask(shared, messages=messages)
    prompt = last_prompt(shared)
    assert prompt == [1, 4, *ids_of(content), 3, 5]
    assert answer.usage.prompt_tokens == len(prompt)


def test_content_parts_and_roles(shared: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "user", "content": ""},
    ]
    ask(shared, messages=messages)
    assert last_prompt(shared) == [1, 4, *ids_of("s"), 3, 4, *ids_of("a\nb"), 3, 4, 3, 5]


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"ä": 1}', {"ä": 1}])
def test_tool_calls_in_the_history(shared: RunningServer, content: dict[str, Any], arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", **content, "tool_calls": [call]}
    response = shared.http.post("/v1/chat/completions", json={"messages": [*YO, turn, *YO]})
    assert response.status_code == 200
    yo = [4, *ids_of("yo"), 3]
    assert last_prompt(shared) == [1, *yo, 5, *ids_of('f({"ä": 1})'), 3, *yo, 5]


def test_ignored_fields_are_reported(shared: RunningServer) -> None:
    body = {
        "messages": [{**YO[0], "mood": 1}],
        "most_thoughts": 5,
        "stream_options": {"x": 1},
        "n": 1,
        "tools": [],
    }
    for _ in range(2):
        response = shared.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        expected = "messages[].mood, most_thoughts, stream_options.x"
        assert response.headers["x-atlas-ignored-fields"] == expected
    assert shared.output.read_text().count("'most_thoughts' was ignored") == 1
    assert "x-atlas-ignored-fields" not in shared.http.post("/v1/chat/completions", json={"messages": YO}).headers


def test_one_broken_request_leaves_the_others(shared: RunningServer) -> None:
    others = shared.openai().chat.completions.create(model="tiny", messages=YO, seed=3, max_tokens=8, stream=True)
    with pytest.raises(openai.InternalServerError, match="not finite") as error:
        ask(shared, seed=4)
    assert error.value.code == "generation_failed"
    with pytest.raises(openai.APIError, match="not finite"):
        stream(shared, seed=4)
    assert text_of(list(others)) == "slow slo"


def test_an_error_in_a_stream_is_an_event(shared: RunningServer) -> None:
    body = {"messages": YO, "seed": 4, "stream": True}
    lines = [line for line in shared.http.post("/v1/chat/completions", json=body).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_sequence(shared: RunningServer, streamed: bool) -> None:
    before = len(shared.events("abort")), len(shared.events("submit"))
    body = {"messages": YO, "seed": 3, "stream": streamed}
    if streamed:
        with shared.http.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(Exception, match="timed out"):
            shared.http.post("/v1/chat/completions", json=body, timeout=0.3)
    abort = eventually(lambda: shared.events("abort")[before[0] :], 1.0)[-1]
    assert abort["known"] and abort["id"] == shared.events("submit")[before[1]]["id"]


def test_a_reader_that_does_not_read_stalls_nobody(shared: RunningServer) -> None:
    body = {"messages": YO, "seed": 2, "stream": True}
    with shared.http.stream("POST", "/v1/chat/completions", json=body):
        assert ask(shared).choices[0].message.content == ANSWER


def test_many_streams_at_once(shared: RunningServer) -> None:
    streams = [
        shared.openai().chat.completions.create(model="tiny", messages=YO, seed=1, stream=True) for _ in range(16)
    ]
    assert [text_of(list(one)) for one in streams] == ["abcDEFGHIJklm"] * 16


def test_no_chat_template(start: Start, tmp_path: Any) -> None:
    server = start(model=make_checkpoint(tmp_path / "plain", chat_template=None)).wait_ready()
    with pytest.raises(openai.BadRequestError, match="template") as error:
        ask(server, model="plain")
    assert error.value.code == "no_chat_template"
    completion = server.openai().completions.create(model="plain", prompt=[1, 120])
    assert completion.choices[0].text == ANSWER
    assert "/v1/completions" in server.output.read_text()


def test_a_broken_chat_template(start: Start, tmp_path: Any) -> None:
    server = start(model=make_checkpoint(tmp_path / "broken", chat_template="{% if %}")).wait_ready()
    with pytest.raises(openai.BadRequestError, match=r"template cannot be used .*line 1"):
        ask(server, model="broken")


def test_a_slow_template_does_not_stop_the_others(start: Start, tmp_path: Any) -> None:
    loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    source = "{% if messages[0].content == 'slow' %}" + loops + "{% endif %}" + CHAT_TEMPLATE
    server = start(model=make_checkpoint(tmp_path / "slow", chat_template=source)).wait_ready()
    slow = {"messages": [{"role": "user", "content": "slow"}, {"role": "user", "content": "x" * 10000}]}
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        answer = pool.submit(httpx.post, server.url + "/v1/chat/completions", json=slow, timeout=10)
        meanwhile = 0
        while not answer.done():
            asked = time.monotonic()
            assert ask(server, model="slow").choices[0].message.content == ANSWER
            assert time.monotonic() - asked < 1
            meanwhile += 1
        response = answer.result()
    assert response.status_code == 400
    assert "chat template failed: TemplateLimitError" in response.json()["error"]["message"]
    assert meanwhile >= 2 and time.monotonic() - began < 7
