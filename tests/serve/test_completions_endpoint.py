"""Text completions, the model list, and the endpoints' plain HTTP behaviour."""

from __future__ import annotations

import inspect
import json
from typing import Any

import openai
import pytest
from serve_harness import ANSWER, RunningServer, ids_of

from atlas.engine.sampling import choice_seed
from atlas.serve.openai import requests
from atlas.serve.openai.requests import CompletionRequest


def ask(server: RunningServer, **fields: Any) -> Any:
    return server.openai().completions.create(**{"model": "tiny", "prompt": "yo", **fields})


def prompts(server: RunningServer, count: int) -> list[list[int]]:
    return [entry["prompt"] for entry in server.events("submit")[-count:]]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("yo", [[1, *ids_of("yo")]]),
        ("<s>yo", [[1, *ids_of("yo")]]),  # BOS is not added twice
        (["a", "b"], [[1, *ids_of("a")], [1, *ids_of("b")]]),
        ([1, 120], [[1, 120]]),
        ([[1, 120], [7]], [[1, 120], [7]]),
        (["a", [7]], [[1, *ids_of("a")], [7]]),
    ],
)
def test_kinds_of_prompt(shared: RunningServer, prompt: Any, expected: list[list[int]]) -> None:
    answer = ask(shared, prompt=prompt)
    assert prompts(shared, len(expected)) == expected
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (index, ANSWER, "stop") for index in range(len(expected))
    ]
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == sum(map(len, expected))
    assert answer.usage.completion_tokens == len(expected) * (len(ANSWER.encode()) + 1)


def test_a_stream_of_several_prompts(shared: RunningServer) -> None:
    fields = {"prompt": ["a", "b", "c"], "seed": 60, "stop": "GH"}
    chunks = list(ask(shared, **fields, stream=True, stream_options={"include_usage": True}))
    texts, reasons = ["", "", ""], [None, None, None]
    for chunk in chunks:
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == ["60 abcDEF", "61 abcDEF", "62 abcDEF"] and reasons == ["stop"] * 3
    whole = ask(shared, **fields)
    assert [choice.text for choice in whole.choices] == texts
    assert whole.usage == chunks[-1].usage


def test_prompts_of_one_request_are_independent_draws(shared: RunningServer) -> None:
    """Without a seed each prompt has one of its own; with one, they are mixed from it."""
    before = len(shared.events("submit"))
    ask(shared, prompt=["yo"] * 5)
    ask(shared, prompt=["yo"] * 3, seed=-1)
    seeds = [event["sampling"]["seed"] for event in shared.events("submit")[before:]]
    assert len(set(seeds[:5])) == 5 and seeds[5:] == [choice_seed(-1, i) for i in range(3)]


def test_the_best_of_several(shared: RunningServer) -> None:
    whole = ask(shared, seed=70, best_of=4, n=2)
    assert [(choice.index, choice.text, choice.logprobs) for choice in whole.choices] == [
        (0, "73", None),
        (1, "71", None),
    ]
    assert whole.usage.completion_tokens == 4 * 3 and whole.usage.prompt_tokens == 3
    # Each prompt has its own.
    two = ask(shared, prompt=["a", "b"], seed=70, best_of=3, logprobs=1)
    assert [(choice.index, choice.text) for choice in two.choices] == [(0, "71"), (1, "75")]
    assert [set(choice.logprobs.token_logprobs) for choice in two.choices] == [{-1.0}, {-0.1}]
    assert ask(shared, seed=70, best_of=4, n=4, max_tokens=1).choices[0].text == "7"
    assert [choice.text for choice in ask(shared, seed=70, best_of=2, n=2).choices] == ["70", "71"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"best_of": 1, "n": 2}, "from n, 2, to 128"),
        ({"best_of": 0}, "from n, 1, to 128"),
        ({"best_of": 129}, "from n, 1, to 128"),
        ({"best_of": 2, "stream": True}, "of a stream"),
        ({"best_of": 128, "prompt": ["a"] * 17}, "128 for 17 prompts"),
    ],
)
def test_a_best_of_that_cannot_be(shared: RunningServer, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as error:
        ask(shared, **fields)
    assert error.value.param == "best_of"


def test_best_of_streams_where_all_are_returned(shared: RunningServer) -> None:
    chunks = ask(shared, seed=70, best_of=1, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "70"


def test_log_probabilities_with_an_echo(shared: RunningServer) -> None:
    whole = ask(shared, prompt="yo", echo=True, logprobs=2, seed=70)
    (choice,) = whole.choices
    assert choice.text == "yo70"
    found = choice.logprobs
    assert found.tokens == ["<s>", "y", "o", "7", "0", "<|eot|>"]
    assert found.token_logprobs == [None, -3.0, -3.0, -3.0, -3.0, -3.0] and found.top_logprobs[0] is None
    assert all(len(entry) == 2 for entry in found.top_logprobs[1:])
    assert found.text_offset == [0, 0, 1, 2, 3, 4]
    parts = [c.choices[0] for c in ask(shared, prompt="yo", echo=True, logprobs=2, seed=70, stream=True) if c.choices]
    assert "".join(part.text for part in parts) == choice.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [entry for part in parts if part.logprobs for entry in getattr(part.logprobs, name)]
        assert joined == getattr(found, name), name


def test_every_field_of_the_official_client_is_read_or_refused(shared: RunningServer) -> None:
    """Whatever the client can send for a completion."""
    parameters = set(inspect.signature(openai.resources.Completions.create).parameters)
    for name in parameters - {"self", "extra_headers", "extra_query", "extra_body", "timeout"}:
        refused = name in requests.refused(CompletionRequest)
        assert refused or name in CompletionRequest.__struct_fields__, name
        if refused:
            answer = shared.http.post("/v1/completions", json={"prompt": "a", name: "surely not"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
            assert name in answer.json()["error"]["message"]


def test_raw_events(shared: RunningServer) -> None:
    response = shared.http.post("/v1/completions", json={"prompt": "yo", "stream": True})
    lines = [line for line in response.text.splitlines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
    assert events[-1]["choices"][0] == {"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}


def test_one_failing_prompt_fails_the_request_and_frees_the_rest(shared: RunningServer) -> None:
    with pytest.raises(openai.InternalServerError, match="not finite"):
        ask(shared, prompt=["a", "b"], seed=4)
    assert ask(shared).choices[0].text == ANSWER


def test_the_context_limit(shared: RunningServer) -> None:
    assert ask(shared, prompt=[7] * 511, seed=2).usage.completion_tokens == 1
    assert ask(shared, prompt=[7] * 496, seed=2, max_tokens=16).usage.completion_tokens == 16
    for prompt in ([7] * 512, "x" * 511, "x" * 20_000, "x" * 3_000_000):
        with pytest.raises(openai.BadRequestError, match=r"\d+ tokens.*512") as error:
            ask(shared, prompt=prompt)
        assert error.value.code == "context_length_exceeded" and error.value.param == "prompt"


def test_models(shared: RunningServer) -> None:
    card = shared.openai().models.list().data[0]
    assert (card.id, card.object) == ("tiny", "model")
    assert card.model_dump()["max_model_len"] == 512
    assert shared.openai().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        shared.openai().models.retrieve("org/other")
    assert error.value.code == "model_not_found"


def test_health(shared: RunningServer) -> None:
    response = shared.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_start_up_tells_what_it_took(shared: RunningServer) -> None:
    lines = shared.output.read_text().splitlines()
    ledger = next(i for i, line in enumerate(lines) if line.startswith("ready in "))
    assert "weights 0.01" in lines[ledger] and "model 0." in lines[ledger]
    assert f"http://127.0.0.1:{shared.port}/v1" in lines[ledger + 1]
    assert lines[ledger + 2].startswith(f"curl http://127.0.0.1:{shared.port}/v1/chat/completions -H ")
