"""The sampling fields of both endpoints, on the real engine with a tiny random model.

The engine's own tests say that a token follows from the logits; these say that a request's fields reach it and that
its answers are worded as the OpenAI API and vLLM word them, streamed and not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams, SequenceOutput, TokenLogprobs
from atlas.engine.sampling import choice_seed
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.serve.generation import Reported
from atlas.serve.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from atlas.tokenizer import Tokenizer
from atlas.weights import open_checkpoint
from tests import tiny_model
from tests.serve.real_server import ServerProcess
from tests.serve.serve_harness import EOS, EOT, ids_of, make_checkpoint

PROMPT = "The é"
IDS = [1, *ids_of(PROMPT)]
YO: Any = [{"role": "user", "content": "yo"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    return tiny_model.write(folder, eos_token_id=2)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("--backend", "cpu", "--quant", "f32", "--max-seqs", "8")
    server = ServerProcess(folder, model, *flags)
    with server.started(60), httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return strict(response.text)


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = http.post(f"/v1/{path}", json=body).text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [strict(event.removeprefix("data: ")) for event in events[:-1]]


def parts(events: list[Any], index: int, field: str) -> list[Any]:
    """What the chunks of one choice have under `field`."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice[field] for choice in choices if choice.get(field) is not None]


def in_engine(model: Path, prompt: list[int], **params: Any) -> SequenceOutput:
    """The engine's own answer, without a server."""
    with open_checkpoint(model) as checkpoint:
        engine = Engine(Runner.load(checkpoint, RunnerOptions(backend="cpu", quant="f32")))
    engine.add("a", prompt, SamplingParams(**params))
    outputs = []
    while engine.busy:
        outputs += engine.step()
    return SequenceOutput.join(outputs)


FIELDS: list[dict[str, Any]] = [
    {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 0, "frequency_penalty": -1.5},
    {"temperature": 1.0, "logit_bias": {"100": 6.5, "101": -100}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_fields_reach_the_engine(http: httpx.Client, model: Path, fields: dict[str, Any]) -> None:
    """The server's tokens and numbers are the engine's."""
    given = {**fields, "logit_bias": {int(k): v for k, v in fields.get("logit_bias", {}).items()}}
    expected = in_engine(
        model, IDS, **given, max_tokens=12, seed=7, stop_token_ids=(EOS, EOT), logprobs=3, prompt_logprobs=3
    )
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 7, "logprobs": 3, "echo": True, "top_p": 1, **fields}
    answer = post(http, "completions", body)["choices"][0]["logprobs"]
    reports = [None, *expected.prompt_logprobs, *expected.logprobs]
    assert len(answer["tokens"]) == len(reports) == len(IDS) + len(expected.token_ids)
    assert answer["token_logprobs"][0] is None and answer["top_logprobs"][0] is None
    for logprob, report in zip(answer["token_logprobs"][1:], reports[1:], strict=True):
        assert report is not None and logprob == pytest.approx(report.logprob, abs=1e-6)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_choices_are_independent_and_reproducible(http: httpx.Client, path: str) -> None:
    prompt = {"prompt": PROMPT} if path == "completions" else {"messages": YO}
    body = {**prompt, "max_tokens": 8, "temperature": 1.5, "seed": 11, "ignore_eos": True}

    def texts(answer: Any) -> list[str]:
        return [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]

    one, four = post(http, path, body), post(http, path, {**body, "n": 4})
    assert [choice["index"] for choice in four["choices"]] == [0, 1, 2, 3]
    assert texts(four)[0] == texts(one)[0] and len(set(texts(four))) == 4
    assert texts(post(http, path, {**body, "n": 4})) == texts(four)
    assert texts(post(http, path, {**body, "seed": choice_seed(11, 2)}))[0] == texts(four)[2]
    assert four["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert four["usage"]["completion_tokens"] == 4 * one["usage"]["completion_tokens"] == 32
    events = stream(http, path, {**body, "n": 4})
    for index, text in enumerate(texts(four)):
        pieces = parts(events, index, "text") or [d.get("content") or "" for d in parts(events, index, "delta")]
        assert "".join(pieces) == text
        assert parts(events, index, "finish_reason") == ["length"]
    assert events[-1]["usage"] == four["usage"]


def test_choices_of_several_prompts_stand_one_after_another(http: httpx.Client) -> None:
    body = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 1, "echo": True, "temperature": 1}
    answer = post(http, "completions", body)
    assert [choice["text"][:2] for choice in answer["choices"]] == ["ab", "ab", "xy", "xy"]
    assert answer["usage"]["prompt_tokens"] == 3 + 4


@pytest.mark.parametrize("options", [{}, {"echo": True}, {"prompt_logprobs": 2}, {"echo": True, "prompt_logprobs": 4}])
def test_a_streamed_completion_says_the_same(http: httpx.Client, options: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 1.2, "seed": 3, "logprobs": 2, "n": 2, **options}
    whole, events = post(http, "completions", body), stream(http, "completions", body)
    for choice in whole["choices"]:
        index, logprobs = choice["index"], choice["logprobs"]
        assert "".join(parts(events, index, "text")) == choice["text"]
        pieces = parts(events, index, "logprobs")
        assert {name: [x for piece in pieces for x in piece[name]] for name in logprobs} == logprobs
        assert parts(events, index, "prompt_logprobs") == [p for p in [choice.get("prompt_logprobs")] if p]
        assert len(logprobs["tokens"]) == 10 + len(IDS) * ("echo" in options) or choice["finish_reason"] == "stop"
        # A token begins at its offset, unless it is part of a character or has no text.
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith(("bytes:", "<")):
                assert choice["text"][offset : offset + len(token)] in (token, "\ufffd" * len(token))
        assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"] if top is not None)
        if "prompt_logprobs" in options:
            table = choice["prompt_logprobs"]
            assert table[0] is None and len(table) == len(IDS)
            for token, entry in zip(IDS[1:], table[1:], strict=True):
                assert options["prompt_logprobs"] <= len(entry) <= options["prompt_logprobs"] + 1
                assert entry[str(token)]["rank"] >= 1 and {e["rank"] for e in entry.values()} >= {1, 2}


def test_a_streamed_chat_says_the_same(http: httpx.Client) -> None:
    body = {"messages": YO, "max_tokens": 12, "temperature": 1.2, "seed": 5, "logprobs": True, "top_logprobs": 4}
    body |= {"ignore_eos": True, "prompt_logprobs": 1}
    choice, events = post(http, "chat/completions", body)["choices"][0], stream(http, "chat/completions", body)
    content = choice["logprobs"]["content"]
    assert [x for piece in parts(events, 0, "logprobs") for x in piece["content"]] == content
    assert parts(events, 0, "prompt_logprobs") == [choice["prompt_logprobs"]]
    assert len(content) == 12 and all(len(entry["top_logprobs"]) == 4 for entry in content)
    for entry in content:
        numbers = [top["logprob"] for top in entry["top_logprobs"]]
        assert numbers == sorted(numbers, reverse=True) and entry["logprob"] <= numbers[0] < 0
        same = [top for top in entry["top_logprobs"] if entry["bytes"] and top["bytes"] == entry["bytes"]]
        assert not same or same[0]["logprob"] == entry["logprob"]


def test_reported_numbers_are_raw(http: httpx.Client) -> None:
    """Whatever is done to the logits afterwards: the first token's likeliest are the same."""
    body = {"prompt": PROMPT, "max_tokens": 1, "logprobs": 5}
    tops = [post(http, "completions", {**body, **f})["choices"][0]["logprobs"]["top_logprobs"][0] for f in FIELDS]
    likeliest = [dict(sorted(top.items(), key=lambda item: -item[1])[:5]) for top in tops]
    assert likeliest.count(likeliest[0]) == len(FIELDS)


def test_scoring_needs_no_generated_token(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = post(http, "completions", body)
    assert answer["choices"][0]["text"] == PROMPT and answer["choices"][0]["finish_reason"] == "length"
    expected = {"prompt_tokens": len(IDS), "completion_tokens": 0, "total_tokens": len(IDS)}
    assert {**answer["usage"], **expected} == answer["usage"]
    longer = post(http, "completions", {**body, "max_tokens": 1})["choices"][0]["logprobs"]
    scored = answer["choices"][0]["logprobs"]
    assert {name: values[: len(IDS)] for name, values in longer.items()} == scored
    assert scored["text_offset"][:2] == [0, 0] and scored["tokens"][0] == "<s>"


def test_min_tokens_and_stop_ids(http: httpx.Client) -> None:
    """A bias makes the end token certain; min_tokens delays it, to the token."""
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 1, "logit_bias": {str(EOT): 100}}
    for least, fields in ((1, {}), (6, {"min_tokens": 5}), (9, {"min_tokens": 9}), (9, {"ignore_eos": True})):
        answer = post(http, "completions", {**body, **fields})
        assert answer["usage"]["completion_tokens"] == least
        assert answer["choices"][0]["finish_reason"] == ("stop" if least < 9 else "length")
    own = {"stop_token_ids": [200], "logit_bias": {"200": 100}, "min_tokens": 3}
    assert post(http, "completions", {**body, **own})["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias: token id 5 twice"),
        ({"logit_bias": {" 5": 1}}, "logit_bias: the key ' 5'"),
        ({"logit_bias": {"5": 101}}, "logit_bias: 101"),
        ({"logit_bias": {str(i): 1 for i in range(321)}}, "logit_bias: 321 entries"),
        ({"stop_token_ids": [5] * 321}, "stop_token_ids: 321 entries"),
        # Nothing would be left to choose from: the client's fault, not the model's.
        ({"min_tokens": 2, "stop_token_ids": list(range(320))}, "min_tokens: 2, and every token of the vocabulary"),
    ],
)
def test_what_cannot_be_meant_is_refused(http: httpx.Client, fields: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_numbers_that_json_has_not_are_null(model: Path) -> None:
    with open_checkpoint(model) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
    report = TokenLogprobs(100, float("-inf"), 9, [240, 5], [-0.1, float("-inf")])
    objects = (
        chat_logprobs([Reported(report, 0)], tokenizer),
        completion_logprobs([(100, report, 0)], 2, tokenizer),
        prompt_logprobs([report], 2, tokenizer),
    )
    chat, completion, prompt = [strict(msgspec.json.encode(value).decode()) for value in objects]
    assert chat["content"][0]["logprob"] is None and chat["content"][0]["top_logprobs"][1]["logprob"] is None
    assert completion["token_logprobs"] == [None]
    assert completion["top_logprobs"] == [{"bytes:\\xe9": -0.1, "<|assistant|>": None, "]": None}]
    assert prompt[1]["100"] == {"logprob": None, "rank": 9, "decoded_token": "]"}
