"""Answers in a grammar, through the engine: a tiny random model gives noise, at temperature 1,
and every answer must hold all the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from atlas.engine.messages import SequenceOutput
from atlas.engine.sampling import Grammar
from tests import tiny_model
from tests.engine import grammar_model
from tests.engine.grammar_model import EOS, EOT, byte_ids, make, text_of
from tests.engine.grammar_requests import BACKENDS, finish, one, params, run
from tests.engine.schemas import SCHEMAS, closed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


# ---- what answers are ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_follows_every_schema(model: Path, backend: str) -> None:
    engine = make(model, backend)
    quote = byte_ids('"')[0]
    for name, schema in SCHEMAS.items():
        for seed in range(3 if backend == "cpu" else 1):
            engine.add(f"{name}/{seed}", [1, 2, 3], params("json_schema", schema, seed=seed, logit_bias={quote: 3.0}))
    for name, output in finish(engine).items():
        text = text_of(output.token_ids)
        assert output.finish_reason == "stop", (name, output.error, text)
        jsonschema.validate(
            json.loads(text), SCHEMAS[name.partition("/")[0]], format_checker=jsonschema.FormatChecker()
        )


@pytest.mark.parametrize(
    ("syntax", "text", "pattern"),
    [
        ("regex", "[a-c]{3}(x|yy)+z", "[a-c]{3}(x|yy)+z"),
        ("choice", '["yes", "no", "per\\"haps\\\\\\n", "naïve ☃"]', 'yes|no|per"haps\\\\\n|naïve ☃'),
        ("lark", 'start: "<" word ("," word)* ">"\nword: /[ab]{1,3}/', "<[ab]{1,3}(,[ab]{1,3})*>"),
        ("gbnf", 'root ::= item+ "."\nitem ::= [0-9] | "x"', "[0-9x]+[.]"),
    ],
)
def test_noise_follows_other_grammars(model: Path, syntax: str, text: str, pattern: str) -> None:
    engine = make(model)
    outputs = run(engine, **{str(seed): params(syntax, text, seed=seed, temperature=3.0) for seed in range(6)})
    for output in outputs.values():
        assert output.finish_reason == "stop" and re.fullmatch(pattern, text_of(output.token_ids)), output
    assert len({tuple(output.token_ids) for output in outputs.values()}) > 1, "the seeds draw"


@pytest.mark.parametrize(
    "pattern",
    [
        *(r'^[^"]+$', r"^[^\\]+$", r'^[^"\\]*$', r'^(a|[^"])+$', r'^[^"][^a]$', r'^\[[^"]+\]$', r'^\\[^"]+$'),
        *("^[a-z]+$", "^[^a]+$", r"^.+$", r"^\S{2}$", r"^[ -~]{2,}$", "a", "^a", "a$", r"^\d+$", r"^[^\s\d]{2}$"),
    ],
)
def test_a_pattern_is_of_the_string_and_not_of_its_escapes(pattern: str) -> None:
    """llguidance by itself lets an escaped quote pass `[^"]+`."""
    compiled = grammar_model.compiler().matcher(
        Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    )
    for text in (
        *("ab", '"a', 'a"', '""', "\\\\", "\\a", "a\\", "\n\n", '\t"', "é☃", "[b]", '["]', "7", '\\"', " \t"),
    ):
        for spelled in {json.dumps(text), json.dumps(text, ensure_ascii=False)}:
            matcher, ids = compiled.deep_copy(), byte_ids(spelled)
            if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
                assert re.search(pattern, text), f"{spelled} is accepted"


def test_what_a_schema_says_of_patterns_is_left_alone() -> None:
    """Data of a schema is no pattern, and a property may be called so."""
    schema = closed(pattern={"enum": ["[^a]", {"pattern": "[^b]"}]}, x={"const": "[^"})
    matcher = grammar_model.compiler().matcher(Grammar("json_schema", json.dumps(schema)))
    text = json.dumps({"pattern": {"pattern": "[^b]"}, "x": "[^"})
    assert matcher.try_consume_tokens(byte_ids(text)) == len(byte_ids(text)) and matcher.is_stopped()


def test_json_has_bounded_whitespace(model: Path) -> None:
    """Known failure: small models write whitespace without end. This one would write nothing else."""
    spaces = dict.fromkeys((*byte_ids(" \n\t\r"), *range(263, grammar_model.VOCAB)), 30.0)
    schema = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    output = one(model, params("json_schema", schema, logit_bias=spaces))
    text = text_of(output.token_ids)
    assert json.loads(text) == [1, 1, 1] and len(text) > 30, "there was whitespace"
    assert max(map(len, re.findall(r"\s+", text))) <= 33


def test_any_object(model: Path) -> None:
    close = dict.fromkeys(byte_ids('"}'), 6.0)
    output = one(model, params("json_object", temperature=0.3, logit_bias=close))
    assert output.finish_reason == "stop" and isinstance(json.loads(text_of(output.token_ids)), dict)


def test_the_end_of_the_grammar_is_the_end_at_once(model: Path) -> None:
    """No token is spent on an end: the last one completes the text."""
    output = one(model, params("regex", "abc"))
    assert (output.token_ids, output.finish_reason, output.complete) == (byte_ids("abc"), "stop", True)
    exact = one(model, params("regex", "abc", max_tokens=3))
    assert (exact.token_ids, exact.finish_reason) == (byte_ids("abc"), "stop")
    cut = one(model, params("regex", "abc", max_tokens=2))
    assert (cut.token_ids, cut.finish_reason) == (byte_ids("ab"), "length")


def test_where_the_text_may_end_the_sequence_s_own_stop_tokens_end_it(model: Path) -> None:
    """And no other token does: the tokenizer's end is one only if the request says so."""
    push = {"logit_bias": {EOS: 50.0, EOT: 60.0, 9: 70.0}}
    output = one(model, params("regex", "a+", **push))
    assert output.token_ids == [*byte_ids("a"), EOT] and not output.complete, "the last id is no part of the text"
    assert one(model, params("regex", "a+", stop_token_ids=(EOS,), **push)).token_ids == [*byte_ids("a"), EOS]
    endless = one(model, params("regex", "a+", stop_token_ids=(), max_tokens=9, **push))
    assert (endless.token_ids, endless.finish_reason) == (byte_ids("a") * 9, "length")
    early = one(model, params("regex", "aa+", **push))
    assert early.token_ids == [*byte_ids("aa"), EOT], "not before the text is complete"


def test_an_empty_text(model: Path) -> None:
    """One that may be, and one that must."""
    assert one(model, params("choice", [""])).finish_reason == "stop"
    alone = one(model, params("choice", [""], stop_token_ids=()))
    assert (alone.token_ids, alone.finish_reason) == ([], "stop")
    both = one(model, params("choice", ["", "a"], logit_bias={EOS: 50.0}))
    assert (both.token_ids, both.finish_reason) == ([EOS], "stop")


# ---- with other parameters -----------------------------------------------------------------------


def test_min_tokens_delays_the_end_as_far_as_the_grammar_goes(model: Path) -> None:
    push = {"logit_bias": {EOS: 50.0}}
    assert one(model, params("regex", "a+", min_tokens=5, **push)).token_ids == [*byte_ids("aaaaa"), EOS]
    short = one(model, params("regex", "a{1,3}", min_tokens=5, **push))
    assert (short.token_ids, short.finish_reason) == (byte_ids("aaa"), "stop")
    assert one(model, params("choice", [""], min_tokens=5, stop_token_ids=(EOS,))).token_ids == [EOS]


def test_a_bias_and_temperature_0_choose_among_what_is_allowed(model: Path) -> None:
    digits = {byte_ids(str(n))[0]: float(n) * 10 for n in range(10)}
    greedy = one(model, params("regex", "[0-7]{5}", temperature=0.0, logit_bias=digits))
    assert text_of(greedy.token_ids) == "77777"
    free = one(model, params(temperature=0.0, max_tokens=1)).token_ids
    assert one(model, params("regex", "[0-9]{2}", temperature=0.0)).token_ids[:1] != free, "the mask decided"


def test_logprobs_are_the_model_s_own(model: Path) -> None:
    """Raw, as without a grammar: not of the masked distribution."""
    engine = make(model)
    engine.add("a", [1, 2, 3], params("regex", "[xyz]{4}", logprobs=4))
    outputs, rows = [], []
    while engine.busy:
        outputs += engine.step()
        if len(outputs) > len(rows):
            rows.append(engine.runner.read("logits")[0].astype(np.float64))
    whole = SequenceOutput.join(outputs)
    assert len(whole.logprobs) == len(rows) == 4 and re.fullmatch("[xyz]{4}", text_of(whole.token_ids))
    for report, row in zip(whole.logprobs, rows, strict=True):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert report.logprob == pytest.approx(expected[report.token_id], abs=1e-5)
        assert report.top_ids == np.argsort(-row, kind="stable")[:4].tolist()


def test_rows_past_the_tokenizer_are_never_chosen(model: Path) -> None:
    """The model has more rows than the tokenizer has tokens."""
    known = grammar_model.compiler().tokenizer.vocab_size
    bias = dict.fromkeys(range(known, grammar_model.VOCAB), 90.0)
    output = one(model, params("regex", "(.|\n){8}", logit_bias=bias))
    assert max(output.token_ids) < known


def test_choices_of_one_request_draw_apart(model: Path) -> None:
    engine = make(model)
    outputs = run(engine, **{str(seed): params("regex", "[a-z]{12}", seed=seed) for seed in range(8)})
    assert len({text_of(output.token_ids) for output in outputs.values()}) == 8
