"""Structured output through the official client: what is written keeps to the schema, by the word of `jsonschema`."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.clients.asking import CAPITAL, GREEDY, STORY, Gathered
from tests.clients.schemas import SCHEMAS
from tests.clients.test_hostile_schemas import CASES, some
from tests.serve.real_server import MODEL, RealServer

ASK: Any = [{"role": "user", "content": "Write JSON about a cat."}]


class Animal(pydantic.BaseModel):
    """A schema as Pydantic writes it."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    legs: int = pydantic.Field(ge=0, le=8)
    wild: bool


def as_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def ask(client: openai.OpenAI, messages: Any = ASK, **options: Any) -> Any:
    return client.chat.completions.create(messages=messages, **{**GREEDY, "max_tokens": 120, **options})


@pytest.fixture(scope="module")
def answers(server: RealServer) -> dict[tuple[str, bool], Any]:
    """Greedy and drawn, for each schema; asked at once, as that takes a fraction of the time."""

    def one(case: tuple[str, bool]) -> Any:
        name, drawn = case
        options = {"temperature": 1.0, "seed": 7} if drawn else {}
        return ask(server.client, response_format=as_format(SCHEMAS[name]), **options).choices[0]

    cases = [(name, drawn) for name in SCHEMAS for drawn in (False, True)]
    with ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(cases, pool.map(one, cases), strict=True))


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_keeps_to_its_schema(answers: dict[tuple[str, bool], Any], name: str) -> None:
    for drawn in (False, True):
        choice = answers[name, drawn]
        assert choice.finish_reason == "stop", choice.message.content
        value = json.loads(choice.message.content)
        jsonschema.Draft202012Validator(
            SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        ).validate(value)


def test_a_stream_is_the_whole(client: openai.OpenAI, answers: dict[tuple[str, bool], Any]) -> None:
    for name in ("flat", "hard strings"):
        stream = ask(client, response_format=as_format(SCHEMAS[name]), stream=True)
        assert Gathered(stream).text[0] == answers[name, False].message.content


def test_any_json_object(client: openai.OpenAI) -> None:
    answer = ask(client, CAPITAL, response_format={"type": "json_object"}, max_tokens=60)
    text = answer.choices[0].message.content
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_the_clients_own_parsing(client: openai.OpenAI) -> None:
    options: Any = {**GREEDY, "max_tokens": 60}
    parsed = client.chat.completions.parse(messages=ASK, response_format=Animal, **options).choices[0].message.parsed
    assert isinstance(parsed, Animal) and 0 <= parsed.legs <= 8
    with client.chat.completions.stream(messages=ASK, response_format=Animal, **options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_the_responses_api(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
    parsed = client.responses.parse(input=ASK, text_format=Animal, **options).output_parsed
    assert isinstance(parsed, Animal) and 0 <= parsed.legs <= 8
    with client.responses.stream(input=ASK, text_format=Animal, **options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "[A-Z]{3}-[0-9]{2}"}, "[A-Z]{3}-[0-9]{2}"),
        ({"structured_outputs": {"regex": "(yes|no)!{2,4}"}}, "(yes|no)!{2,4}"),
        ({"guided_choice": ["Paris", "Berlin"]}, "Paris|Berlin"),
        ({"structured_outputs": {"choice": ["😀", "naïve"]}}, "😀|naïve"),
        ({"guided_grammar": 'start: "<" /[a-z]{2,5}/ ">"'}, "<[a-z]{2,5}>"),
        ({"structured_outputs": {"grammar": 'start: ("ab" | "c")~2'}}, "(ab|c){2}"),
        ({"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}}, "[1-9][0-9]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_other_kinds(client: openai.OpenAI, extra: Any, pattern: str) -> None:
    for options in ({}, {"temperature": 1.5, "seed": 3}):
        choice = ask(client, CAPITAL, extra_body=extra, max_tokens=30, **options).choices[0]
        assert re.fullmatch(pattern, choice.message.content) and choice.finish_reason == "stop"
    completion = client.completions.create(
        model=MODEL, prompt="Say:", temperature=0, max_tokens=30, extra_body=extra
    ).choices[0]
    assert re.fullmatch(pattern, completion.text)


def test_after_thinking(client: openai.OpenAI) -> None:
    extra = {"enable_thinking": True, "thinking_budget": 5}
    for stream in (False, True):
        answer = ask(client, response_format=as_format(SCHEMAS["enum"]), extra_body=extra, stream=stream)
        if stream:
            text = Gathered(answer).text[0]
        else:
            message = answer.choices[0].message
            text = message.content
            assert message.reasoning_content
        jsonschema.validate(json.loads(text), SCHEMAS["enum"])


def test_other_requests_beside_it_are_free(server: RealServer, client: openai.OpenAI) -> None:
    alone = ask(client, STORY, max_tokens=20).choices[0].message.content

    def one(number: int) -> str:
        options = {"response_format": as_format(SCHEMAS["flat"])} if number % 2 else {"max_tokens": 20}
        text: str = ask(client, ASK if number % 2 else STORY, **options).choices[0].message.content
        return text

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(one, range(6)))
    assert texts[::2] == [alone] * 3
    assert len({*texts[1::2]}) == 1 and json.loads(texts[1])


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "objekt"}, ".type"),
        ({"type": "object", "properties": {"a": {"type": 5}}}, ".properties.a.type"),
        ({"type": "string", "pattern": "(["}, ".pattern"),
        ({"type": "object", "properties": {"a": {"items": {"pattern": "(["}}}}, ".properties.a.items.pattern"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}}, ".properties.a.$ref"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, ".minimum"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?=x)y"}]}, ".anyOf[1].pattern"),
    ],
    ids=str,
)
def test_a_bad_schema_is_named_by_its_path(client: openai.OpenAI, schema: Any, path: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format=as_format(schema))
    assert str(caught.value.param) == "response_format.json_schema.schema" + path
    assert str(caught.value.param) in str(caught.value)


@pytest.mark.parametrize("name", some(name for name in CASES if name.startswith(("schema: ", "guided: "))))
def test_a_costly_one_fails_by_itself_alone(client: openai.OpenAI, name: str) -> None:
    """Whatever a grammar costs the engine: it is followed, or the request is to blame, and others go on."""
    case = dict(CASES[name])
    options = {"response_format": case.pop("response_format")} if "response_format" in case else {}
    stream = client.chat.completions.create(messages=STORY, stream=True, **{**GREEDY, "max_tokens": 6})
    try:
        choice = ask(client, extra_body=case, max_tokens=6, temperature=1, seed=1, **options).choices[0]
        assert choice.finish_reason in ("stop", "length")
    except openai.BadRequestError as error:
        assert error.code in ("invalid_grammar", "grammar_too_large", "grammar_too_complex")
    assert Gathered(stream).finish == {0: "length"}


@pytest.mark.parametrize(
    "extra",
    [
        {"guided_regex": "(["},
        {"guided_choice": []},
        {"guided_grammar": "start: nothing"},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "yaml"}},
        {"guided_regex": "a", "guided_choice": ["b"]},
    ],
    ids=str,
)
def test_a_bad_request_names_its_field(client: openai.OpenAI, extra: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=extra)
    assert any(str(caught.value.param).startswith(name) for name in extra)
