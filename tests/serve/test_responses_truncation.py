"""`truncation: auto`: what goes when a conversation does not fit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from serve_harness import RunningServer

from atlas.engine.messages import SamplingParams
from atlas.serve.chat_generation import Prepared
from atlas.serve.errors import ApiError, invalid
from atlas.serve.generation import Job
from atlas.serve.openai.responses_conversation import Conversation
from atlas.serve.openai.responses_truncation import DROPPED, fit
from atlas.text.messages import ChatMessage

CONTEXT = 100


def conversation(text: str) -> Conversation:
    """`su9a9` is a system message of one token, one of the user of 9, one of the assistant of 9."""
    result = Conversation()
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    for letter in text:
        if letter.isdigit():
            last = result.messages[-1]
            last.content = f"{(last.content or '')}{letter}"  # type: ignore[str-format]
        else:
            result.messages.append(ChatMessage(roles[letter]))  # type: ignore[arg-type]
            result.where.append(f"input[{len(result.where)}]")
    return result


def size(one: Conversation) -> int:
    return sum(int(message.content or 1) for message in one.messages)  # type: ignore[arg-type]


async def prepare(one: Conversation) -> Prepared:
    if any(message.content == "0" for message in one.messages):
        raise invalid("input", "bad")
    tokens = size(one)
    if tokens >= CONTEXT:
        raise invalid("input", f"{tokens} tokens", code="context_length_exceeded")
    job = Job(0, [0] * tokens, SamplingParams(max_tokens=CONTEXT - tokens), ())
    return Prepared([job], {})


def fitted(text: str, room: int = 10) -> tuple[int, int]:
    """Tokens of the prompt, and messages that went."""
    prepared = asyncio.run(fit(conversation(text), prepare, room))
    return len(prepared.jobs[0].prompt), int(prepared.headers.get(DROPPED, 0))


@pytest.mark.parametrize(
    ("text", "room", "prompt", "dropped"),
    [
        ("su9a9u9", 10, 28, 0),
        ("su50a40u9", 10, 10, 2),
        ("su50a30u9", 10, 90, 0),  # exactly
        ("su50a30u9", 11, 10, 2),
        ("su30a30u30a9u9", 10, 49, 2),
        ("sdu50a50t9t9a9u9", 10, 11, 5),  # results go with their calls
        ("u95", 10, 95, 0),  # the last message stays, whatever room it leaves
        ("u50a50u95", 10, 95, 2),
        ("a99u9", 10, 9, 1),
        ("u9a90u9a9t9", 10, 27, 2),
    ],
)
def test_as_little_goes_as_must(text: str, room: int, prompt: int, dropped: int) -> None:
    assert fitted(text, room) == (prompt, dropped)


@pytest.mark.parametrize("text", ["u100", "s99u9", "u9a9u100", "u9a50a50"])
def test_what_cannot_fit_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        fitted(text)
    assert caught.value.body.code == "context_length_exceeded"


def test_any_other_error_is_told() -> None:
    for text in ("u0", "u50a60u0"):
        with pytest.raises(ApiError) as caught:
            fitted(text)
        assert caught.value.body.code == "invalid_value"


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_trying_one_after_another_finds(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("uat") + str(rng.randrange(1, 30)) for _ in range(rng.randrange(1, 40))) + "u5"
    whole = conversation(text)
    cuts = [0, *whole.cuts()]
    expected = next(cut for cut in cuts if size(whole.without(cut)) <= CONTEXT - 10)
    assert fitted(text) == (size(whole.without(expected)), expected)


def test_a_conversation_that_grew_too_long_goes_on(shared: RunningServer) -> None:
    """The context of this server is 512 tokens; one is a byte."""
    client = shared.openai()
    options: Any = {"extra_body": {"seed": 1}, "max_output_tokens": 20}
    previous = None
    for turn in range(4):
        text = str(turn) * 170
        answer = client.responses.create(input=text, previous_response_id=previous, truncation="auto", **options)
        assert answer.truncation == "auto" and answer.output_text == "abcDEFGHIJklm"
        previous = answer.id
    prompt = bytes(token - 7 for token in shared.events("submit")[-1]["prompt"] if token >= 7).decode()
    assert "0" not in prompt and "1" not in prompt and prompt.count("2") == prompt.count("3") == 170
    body = {"input": "4" * 170, "previous_response_id": previous}
    raw = shared.http.post("/v1/responses", json={**body, "truncation": "auto"})
    assert raw.status_code == 200 and int(raw.headers[DROPPED]) == 6
    assert shared.http.post("/v1/responses", json=body).json()["error"]["code"] == "context_length_exceeded"
