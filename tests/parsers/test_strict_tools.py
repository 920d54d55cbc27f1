"""Strict tools: a model may write any text, and calls only as their schemas say. Random walks through the grammars."""

from __future__ import annotations

import datetime
import enum
import json
import random
import uuid
from typing import Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest

from atlas.engine.sampling import Grammar
from atlas.errors import RequestError
from atlas.parsers import TOOL_FORMATS, AnswerParser, collect
from atlas.parsers.grammars import opener_of, tool_grammar
from tests.engine.grammar_model import EOS, byte_ids, compiler
from tests.engine.test_random_schemas import members, schema

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def grammar(name: str, tools: Any, **given: Any) -> Grammar:
    options: dict[str, Any] = {"one": False, "free": True, "strict": frozenset(tools), **given}
    return Grammar("lark", tool_grammar(name, tools, special={}, **options))


def accepts(grammar: Grammar, text: str) -> bool:
    matcher, ids = compiler().matcher(grammar), byte_ids(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def written(name: str, arguments: str) -> str:
    """A call of `get` as models of the format write it, of a day or another text for `days`."""
    city, days = json.loads(arguments)["city"], json.dumps(json.loads(arguments)["days"])
    tags = f'<parameter name="city">{city}</parameter>\n<parameter name="days">{days}</parameter>\n</invoke>\n'
    marked = tags.replace("</", "</｜DSML｜").replace("<p", "<｜DSML｜p")
    marked = marked.replace('"city"', '"city" string="true"').replace('"days"', '"days" string="false"')
    keyed = f"<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n"
    keyed += f"<arg_key>days</arg_key>\n<arg_value>{days}</arg_value>\n"
    return {
        "hermes": f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>',
        "llama3_json": f'{{"name": "get", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "get", "arguments": {arguments}}}]',
        "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>"
        f"{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "qwen3_coder": "<tool_call>\n<function=get>\n"
        f"<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>get\n{keyed}</tool_call>",
        "minimax": f'<minimax:tool_call>\n<invoke name="get">\n{tags}</minimax:tool_call>',
        "deepseek_v32": f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n{marked}</｜DSML｜function_calls>',
        "gemma": f'<|tool_call>call:get{{city:<|"|>{city}<|"|>,days:{days}}}<tool_call|>',
    }[name]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_text_and_calls_that_fit(name: str) -> None:
    made = grammar(name, {"get": CITY})
    good, bad = written(name, '{"city": "Paris", "days": 3}'), written(name, '{"city": "Paris", "days": 0}')
    long = written(name, '{"city": "Parisisisis", "days": 3}')
    for text in ("", "Hello.", "a < b <tool> {x} [y] call:", "ünï ☃\n\n"):
        assert accepts(made, text), text
    assert accepts(made, good) and not accepts(made, bad) and not accepts(made, long)
    if name != "llama3_json":  # whose calls stand where the answer begins, or are text
        assert accepts(made, f"I look.\n{good}")
        assert not accepts(made, f"I look.\n{bad}") and not accepts(made, f"I look.\n{opener_of(name, {})} nothing")
    one = grammar(name, {"get": CITY}, one=True)
    assert accepts(one, good) and accepts(one, "Hello.") and not accepts(one, good + "\n" + good)


@pytest.mark.parametrize("values", [["", "a"], ["a", 1, None, "null"], ["1", True], [[1], {"a": None}], ["</x>", 'q"']])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_values_of_an_enum(name: str, values: list[Any]) -> None:
    """Each comes back as what it is, where the notation tells text from other values, and as one of them in any."""
    tools = {"get": {"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"]}}
    made = grammar(name, tools, free=False, one=True)
    found = set()
    for seed in range(8):
        text = walk(made, random.Random(seed), name)
        assert text is not None
        parser = AnswerParser(TOOL_FORMATS[name], tools)
        (call,) = collect([*parser.feed(text), *parser.finish()]).calls
        value = json.loads(call.arguments)["a"]
        assert value in values or value in ("null", "1") or str(value) in values, text
        found.add(call.arguments)
        if name in ("hermes", "llama3_json", "mistral", "deepseek", "deepseek_v32", "gemma"):
            assert value in values
    assert len(found) > 1


class Colour(enum.StrEnum):
    red, green = "red", "green"


class Inner(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    size: int
    tags: list[str]


class Model(pydantic.BaseModel):
    """What the SDKs make strict schemas of."""

    model_config = pydantic.ConfigDict(extra="forbid")
    text: str
    maybe: str | None
    number: int | None
    ratio: float
    kind: Literal["a", "b"]
    other: Literal["c", "d"] | None
    colour: Colour
    colour_or_not: Colour | None
    inner: Inner
    inner_or_not: Inner | None
    many: list[Inner]
    at: datetime.datetime
    day: datetime.date | None
    id: uuid.UUID
    short: str = pydantic.Field(min_length=1, max_length=9)
    either: int | str


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_schemas_of_the_sdks_can_be_held(name: str) -> None:
    made = grammar(name, {"get": Model.model_json_schema()}, free=False, one=True)
    for seed in range(3):
        text = walk(made, random.Random(seed), name)
        if text is not None:
            check(name, text, {"get": Model.model_json_schema()}, forced=True)


def walk(made: Grammar, rng: random.Random, name: str) -> str | None:
    """A text of the grammar by allowed tokens at random, that goes on with a call now and then. None: too long."""
    matcher, tokens, tokenizer = compiler().matcher(made), [], compiler().tokenizer
    opener = byte_ids(opener_of(name, {})) if TOOL_FORMATS[name].opens else byte_ids('{"name": ')
    called = False
    while len(tokens) < 1500:
        if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.1):
            return tokenizer.decode_bytes(tokens).decode()
        if not called and rng.random() < 0.3 and matcher.validate_tokens(opener) == len(opener):
            matcher.consume_tokens(opener)
            tokens += opener
            called = True
            continue
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(bits).tolist() if token != EOS]
        if not allowed:
            assert matcher.is_accepting(), matcher.get_error()
            continue
        closing = [token for token in allowed if tokenizer.decode_bytes([token])[:1] in (b'"', b"}", b"]", b"<")]
        tokens.append(rng.choice(closing if closing and len(tokens) > 60 and rng.random() < 0.6 else allowed))
        assert matcher.try_consume_tokens(tokens[-1:]) == 1
    return None


def check(name: str, text: str, tools: dict[str, Any], *, forced: bool = False) -> int:
    """The number of calls in a text, all of which are complete and fit their schemas."""
    parser = AnswerParser(TOOL_FORMATS[name], tools)
    answer = collect([*parser.feed(text), *parser.finish()])
    assert not forced or (answer.calls and not answer.content), text
    for call in answer.calls:
        assert call.complete and call.name in tools, text
        jsonschema.validate(
            json.loads(call.arguments),
            tools[call.name],
            cls=jsonschema.Draft202012Validator,
            format_checker=jsonschema.FormatChecker(),
        )
    return len(answer.calls)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_random_tools(name: str) -> None:
    """A schema that a format cannot hold is refused by the tool's name; all others hold."""
    calls = 0
    for seed in range(8):
        rng = random.Random(f"{name}{seed}")
        tools = {}
        for tool in ("get", "put_x"):
            made = {**members(rng, 2), "additionalProperties": False}
            made.pop("maxProperties", None)
            tools[tool] = {**made, "$defs": {"one": schema(rng, 0), "two": {"type": "boolean"}}}
        try:
            compiled = grammar(name, tools, one=rng.random() < 0.5)
            compiler().matcher(compiled)
        except RequestError as error:
            assert error.where in (*tools, "grammar")
            continue
        text = walk(compiled, rng, name)
        calls += check(name, text, tools) if text is not None else 0
    assert calls or name == "llama3_json"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax", "deepseek_v32", "gemma"])
def test_what_a_notation_cannot_hold_is_refused(name: str) -> None:
    """By the keyword, of a strict tool only."""
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "uri"}}}
    with pytest.raises(RequestError, match="get: format, which cannot be enforced"):
        grammar(name, {"get": odd})
    assert grammar(name, {"get": odd}, strict=())
