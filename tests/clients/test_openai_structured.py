"""Answers that keep to a schema, from trained weights through the official client: each is valid by `jsonschema`."""

from __future__ import annotations

import enum
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.clients.asking import MODEL
from tests.engine.schemas import SCHEMAS

ASK: Any = [{"role": "user", "content": "Give me an example as JSON."}]


def formatted(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_every_schema_at_temperature_1(client: openai.OpenAI) -> None:
    """All of them at once. Nothing in a schema keeps a model from being long-winded: then another draw is made."""

    def ask(name: str) -> None:
        for seed in range(6):
            answer = client.chat.completions.create(
                model=MODEL,
                messages=ASK,
                temperature=1,
                max_tokens=150,
                seed=seed,
                response_format=formatted(SCHEMAS[name]),
            )
            choice = answer.choices[0]
            if choice.finish_reason == "stop":
                value = json.loads(choice.message.content or "")
                jsonschema.validate(value, SCHEMAS[name], format_checker=jsonschema.FormatChecker())
                return
            assert choice.finish_reason == "length", name
        raise AssertionError(f"{name}: no draw came to an end")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, SCHEMAS))


class Colour(enum.StrEnum):
    red, green = "red", "green"


class Fruit(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    colour: Colour
    weights: list[int] = pydantic.Field(max_length=3)


def test_the_client_s_own_parsing(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, temperature=0, max_tokens=200, response_format=Fruit
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Fruit) and parsed.colour in Colour


def test_a_stream_is_the_answer_in_parts(client: openai.OpenAI) -> None:
    given: Any = {"model": MODEL, "messages": ASK, "temperature": 1, "seed": 5, "max_tokens": 200}
    given["response_format"] = formatted(SCHEMAS["flat"])
    whole = client.chat.completions.create(**given).choices[0]
    text, reason = "", None
    for chunk in client.chat.completions.create(**given, stream=True):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (text, reason) == (whole.message.content, whole.finish_reason) and reason == "stop"


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_choice": ["positive", "negative"]}, "positive|negative"),
        ({"guided_regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no, " /[a-z ]{3,9}/'}}, "yes|no, [a-z ]{3,9}"),
        ({"grammar": 'root ::= [A-Z] [a-z]+ "!"'}, "[A-Z][a-z]+!"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_other_spellings(client: openai.OpenAI, extra: Any, pattern: str, temperature: float) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=temperature, max_tokens=60, extra_body=extra, n=2 if temperature else 1
    )
    for choice in answer.choices:
        assert choice.finish_reason == "length" or re.fullmatch(pattern, choice.message.content or "")
    text = client.completions.create(model=MODEL, prompt="The answer:", temperature=0, max_tokens=60, extra_body=extra)
    assert text.choices[0].finish_reason == "length" or re.fullmatch(pattern, text.choices[0].text)


def test_a_schema_that_cannot_be_enforced(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=ASK, response_format=formatted({"type": "array", "uniqueItems": True})
        )
    assert (caught.value.param, caught.value.code) == (
        "response_format.json_schema.schema.uniqueItems",
        "invalid_grammar",
    )


def test_json_after_thinking(client: openai.OpenAI) -> None:
    """The test's template opens thinking; a budget ends it."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        temperature=1,
        seed=3,
        max_tokens=300,
        response_format=formatted(SCHEMAS["flat"]),
        extra_body={"enable_thinking": True, "thinking_budget": 24},
    )
    message = answer.choices[0].message
    jsonschema.validate(json.loads(message.content or ""), SCHEMAS["flat"])
    assert message.reasoning_content  # type: ignore[attr-defined]
