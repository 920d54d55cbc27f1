"""Random combinations of all that a chat request may ask for: streamed is whole, and what was asked for holds."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import openai
import pytest

from tests.clients.asking import CAPITAL, EMOJI, STORY, TURNS
from tests.clients.test_openai_tools import SCHEMAS, TOOLS, named
from tests.serve.real_server import MODEL

SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"enum": ["é", '"', "<|im_end|>"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMATS: Any = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
]


def combination(rng: random.Random) -> dict[str, Any]:
    """A request; its fields may contradict each other."""

    def maybe(chance: float, **fields: Any) -> dict[str, Any]:
        return fields if rng.random() < chance else {}

    body: dict[str, Any] = {"messages": rng.choice([CAPITAL, STORY, EMOJI, TURNS]), "model": MODEL}
    body |= {"max_tokens": rng.choice([1, 2, 6, 20, 45]), "seed": rng.randrange(100)}
    body |= {"temperature": rng.choice([0, 0.7, 1.5])}
    body |= maybe(0.3, n=2) | maybe(0.3, top_p=0.9) | maybe(0.2, presence_penalty=1.0)
    body |= maybe(0.3, logprobs=True, top_logprobs=rng.choice([0, 2]))
    body |= maybe(0.3, stop=rng.choice(["e", ["the", "\n"], '"', "<"]))
    body |= maybe(0.15, logit_bias={"28": 5})
    extra = maybe(0.2, ignore_eos=True) | maybe(0.2, min_tokens=rng.choice([1, 5])) | maybe(0.2, top_k=5)
    extra |= maybe(0.2, include_stop_str_in_output=True)
    extra |= maybe(0.4, enable_thinking=rng.random() < 0.8) | maybe(0.3, thinking_budget=rng.choice([0, 1, 4]))
    if rng.random() < 0.5:
        body |= {"tools": TOOLS, "tool_choice": rng.choice(["auto", "none", "required", named("set_light")])}
        body |= maybe(0.5, parallel_tool_calls=False)
    body |= maybe(0.4, response_format=rng.choice(FORMATS))
    extra |= maybe(0.1, guided_choice=["yes", "<|im_start|>", "é😀"]) | maybe(0.1, guided_regex="[a-c]{2,5}")
    return {**body, "extra_body": extra}


def whole(client: openai.OpenAI, body: Any) -> tuple[dict[int, Any], Any]:
    answer: Any = client.chat.completions.create(**body)
    choices = {}
    for choice in answer.choices:
        message = choice.message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        tokens = [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
        reasoning = getattr(message, "reasoning_content", None) or ""
        choices[choice.index] = (message.content or "", reasoning, calls, choice.finish_reason, tokens)
    return choices, answer.usage


def streamed(client: openai.OpenAI, body: Any) -> tuple[dict[int, Any], Any]:
    parts: dict[int, list[Any]] = {}
    usage = None
    for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            part = parts.setdefault(choice.index, ["", "", [], None, []])
            assert part[3] is None, "something follows the finish reason"
            part[0] += choice.delta.content or ""
            part[1] += getattr(choice.delta, "reasoning_content", None) or ""
            for delta in choice.delta.tool_calls or []:
                if delta.index == len(part[2]):
                    part[2].append((delta.function.name, ""))
                name, arguments = part[2][delta.index]
                part[2][delta.index] = (name, arguments + (delta.function.arguments or ""))
            part[3] = choice.finish_reason
            part[4] += [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
    return {index: tuple(part) for index, part in parts.items()}, usage


def check(client: openai.OpenAI, body: Any) -> bool:
    """Whether it was taken. A refusal must be the same for both."""
    try:
        choices, usage = whole(client, body)
    except openai.BadRequestError as error:
        with pytest.raises(openai.BadRequestError) as caught:
            streamed(client, body)
        assert error.param and (caught.value.param, caught.value.code) == (error.param, error.code)
        return False
    assert streamed(client, body) == (choices, usage)
    forced = body.get("tool_choice") not in (None, "auto", "none")
    for content, _, calls, finish, _ in choices.values():
        assert finish in ("stop", "length", "tool_calls") and (finish == "tool_calls") <= bool(calls)
        for name, arguments in calls:
            if finish == "length" or "stop" in body:
                continue  # the last may be cut
            value = json.loads(arguments)
            if forced:
                jsonschema.validate(value, SCHEMAS[name])
        kind = body.get("response_format", FORMATS[0])["type"]
        if finish == "stop" and content and "stop" not in body and kind != "text":
            jsonschema.validate(json.loads(content), SCHEMA if kind == "json_schema" else {"type": "object"})
    return True


def run(client: openai.OpenAI, count: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    taken = 0
    for _ in range(count):
        body = combination(rng)
        print(json.dumps(body))
        taken += check(client, body)
    assert taken >= count // 5


def test_some_combinations(client: openai.OpenAI) -> None:
    run(client, 5)


@pytest.mark.exhaustive
def test_many_combinations(client: openai.OpenAI) -> None:
    run(client, 250)
