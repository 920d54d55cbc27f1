"""The public SamplingParams: every field is checked when it is made, and the error names it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

import atlas
from atlas.engine.sampling import Grammar, choice_seed
from atlas.engine.sampling import SamplingParams as EngineParams
from atlas.errors import RequestError
from atlas.llm import SamplingParams


def test_it_is_the_attribute_of_the_package() -> None:
    assert atlas.SamplingParams is SamplingParams
    assert {"LLM", "SamplingParams"} <= set(dir(atlas))
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        atlas.LLMs  # noqa: B018


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", 129),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", [3]),
        ("logit_bias", [(3, 1.0)]),
        ("logit_bias", {3.7: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {" 3": 1.0}),
        ("logit_bias", {"1_0": 1.0}),
        ("logit_bias", {"\u0665": 1.0}),  # a digit to `int`, but no id to anyone
        ("logit_bias", {3: 1.0, "3": 2.0}),
        ("logit_bias", {"3": 1.0, "03": 1.0}),
        ("logit_bias", {3: "inf"}),
        ("logit_bias", {3: float("inf")}),
        ("logit_bias", {3: 10**400}),
        ("logit_bias", {3: True}),
        ("logit_bias", {3: None}),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop", 0),
        ("stop", False),
        ("stop_token_ids", 0),
        ("stop_token_ids", "56"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", 0),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("seed", 1 << 63),
        ("seed", 0.5),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.where.startswith(field)


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_spellings_that_mean_the_same() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(-1),
        stop="END",
        stop_token_ids=[5],
        logit_bias={"7": 1, np.int64(8): np.float32(2)},
        top_p=1,
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=0, stop=("END",), stop_token_ids=(5,), logit_bias={7: 1.0, 8: 2.0}
    )
    for ids in (np.array([0, 5]), [np.int32(0), np.uint8(5)], range(0, 6, 5)):
        assert SamplingParams(stop_token_ids=ids).stop_token_ids == (0, 5)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=np.array([0])).stop_token_ids == (0,)  # type: ignore[arg-type]
    assert SamplingParams(stop=None, logit_bias=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


def test_every_field_reaches_the_engine() -> None:
    given: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logit_bias": {3: -1.0},
        "seed": 11,
        "logprobs": 3,
        "prompt_logprobs": 2,
    }
    wishes = {"structured_outputs": {"regex": "a+"}}
    first, second = SamplingParams(**given, **wishes, n=2, stop_token_ids=[8]).choices(100, (2, 3), 320)
    assert first == EngineParams(**given, grammar=Grammar("regex", "a+"), stop_token_ids=(2, 3, 8))
    assert second == msgspec.structs.replace(first, seed=choice_seed(11, 1), prompt_logprobs=None)
    fields = {*EngineParams.__struct_fields__}
    others = {"stop_token_ids", "grammar"}
    # All of a call are equal; a prompt of its own may say how thinking ends; embeddings are not text.
    unreachable = {"thinking", "priority", "pooling"}
    assert fields - unreachable <= {*given, *others}, "a field of the engine that this test does not know"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": {"type": "null"}}, Grammar("json_schema", '{"type":"null"}')),
        ({"json": '{"type": "null"}'}, Grammar("json_schema", '{"type": "null"}')),
        ({"json_object": True, "regex": None}, Grammar("json_object")),
        ({"choice": ("a", "b")}, Grammar("choice", '["a","b"]')),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
        (Grammar("regex", "a"), Grammar("regex", "a")),
        (None, None),
        ({"regex": "a", "json": {}}, "structured_outputs: regex, json; accepted: one of json, json_object"),
        ({}, "structured_outputs: nothing; accepted: one of"),
        ({"regexp": "a"}, "structured_outputs: regexp; accepted: one of"),
        ({"regex": 5}, r"structured_outputs\['regex'\]: 5; accepted: a text"),
        ({"choice": "ab"}, r"structured_outputs\['choice'\]: 'ab'; accepted: a list of strings"),
        ({"json": 5}, r"structured_outputs\['json'\]: 5; accepted: a JSON Schema"),
        ("a+", "structured_outputs: 'a.'; accepted: a mapping"),
    ],
    ids=str,
)
def test_structured_outputs(given: Any, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(RequestError, match=expected):
            SamplingParams(structured_outputs=given)
        return
    assert SamplingParams(structured_outputs=given).choices(9, (), 320)[0].grammar == expected


def test_limits_that_depend_on_the_model() -> None:
    params = SamplingParams(max_tokens=50, min_tokens=20)
    (cut,) = params.choices(10, (2,), 320)
    assert (cut.max_tokens, cut.min_tokens, cut.stop_token_ids) == (10, 10, (2,))
    (whole,) = SamplingParams(max_tokens=None, ignore_eos=True).choices(77, (2,), 320)
    assert (whole.max_tokens, whole.stop_token_ids) == (77, ())
    (odd,) = SamplingParams(top_k=10**30).choices(10, (-1, 2, 320, 2**70), 320)
    assert (odd.top_k, odd.stop_token_ids) == (320, (2,)), "ends that are no ids of the model end nothing"
    for field, message in (
        ({"logit_bias": {320: 1.0}}, "logit_bias: token id 320"),
        ({"stop_token_ids": [9, 320]}, r"stop_token_ids\[1\]: 320"),
        ({"stop_token_ids": range(3, 320), "min_tokens": 1}, "min_tokens: 1, and every token"),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams(**field).choices(10, (0, 1, 2), 320)  # type: ignore[arg-type]


def test_a_request_keeps_the_bias_that_was_checked() -> None:
    params = SamplingParams(logit_bias={5: 1.0})
    (request,) = params.choices(10, (), 320)
    params.logit_bias[10**6] = 1.0
    assert request.logit_bias == {5: 1.0}


def test_without_a_seed_draws_differ() -> None:
    seeds = {SamplingParams().choices(10, (), 320)[0].seed for _ in range(4)}
    assert len(seeds) == 4
