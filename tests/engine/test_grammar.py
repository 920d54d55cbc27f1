"""Answers in a grammar, and thinking that ends, through the engine: a tiny random model gives noise, at temperature 1,
and every answer must hold all the same."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from atlas.engine import grammar as grammar_module
from atlas.engine.constraint import Constraint
from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.engine.sampling import Grammar, Thinking
from atlas.errors import RequestError
from tests import tiny_model
from tests.engine import grammar_model
from tests.engine.grammar_model import END_THINK, EOS, EOT, THINK, byte_ids, make, text_of
from tests.engine.schemas import SCHEMAS, closed

BACKENDS = ["reference", "cpu"]
MODES = [(0, 0), (1, 0), (0, 4), (1, 4), (2, 4)]
"""(steps ahead, rows of a decode step), as in test_ahead.py."""
BLOCK_BYTES = 2 * 2 * 2 * 16 * 32 * 4
THINKING = Thinking(end=(END_THINK,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


def params(syntax: str | None = None, text: Any = "", **given: Any) -> SamplingParams:
    text = text if isinstance(text, str) else json.dumps(text)
    fields: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "stop_token_ids": (EOS, EOT), **given}
    return SamplingParams(grammar=Grammar(syntax, text) if syntax else None, **fields)  # type: ignore[arg-type]


def finish(engine: Engine) -> dict[str, SequenceOutput]:
    """Step until idle; all outputs of each request as one."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(20_000):
        if not engine.busy:
            break
        for output in engine.step():
            parts = outputs.setdefault(output.request_id, [])
            assert not parts or parts[-1].finish_reason is None, "output after a finish reason"
            parts.append(output)
    assert not engine.busy and engine.pool.free == engine.pool.total
    return {name: SequenceOutput.join(parts) for name, parts in outputs.items()}


def run(engine: Engine, **requests: SamplingParams) -> dict[str, SequenceOutput]:
    for name, sampling in requests.items():
        engine.add(name, [1, 2, 3], sampling)
    return finish(engine)


def one(model: Path, sampling: SamplingParams, backend: str = "reference") -> SequenceOutput:
    return run(make(model, backend), only=sampling)["only"]


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


# ---- the engine ----------------------------------------------------------------------------------


def mixed() -> dict[str, SamplingParams]:
    """Requests with and without grammars, of several lengths."""
    close = {"logit_bias": {byte_ids('"')[0]: 3.0}}
    return {
        "schema": params("json_schema", SCHEMAS["nested"], seed=3, **close),
        "plain": params(max_tokens=30, seed=4),
        "regex": params("regex", "[a-z ]{40,60}", seed=5),
        "greedy": params(max_tokens=25, temperature=0.0),
        "recursion": params("json_schema", SCHEMAS["recursion"], seed=6, max_tokens=60, **close),
        "thinking": params("regex", "[ab]{9}", thinking=Thinking((END_THINK,), budget=7), seed=7),
        "budget": params(thinking=Thinking(tuple(byte_ids("</x>")), budget=5), max_tokens=20, seed=8),
        "penalties": params("regex", "[a-h]{20}", frequency_penalty=1.5, seed=9),
        "stops": params("regex", "[a-h]{20}", stop_token_ids=tuple(byte_ids("abc")), seed=10),
        "min": params(min_tokens=6, stop_token_ids=tuple(range(0, 320, 2)), seed=11, max_tokens=12),
    }


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, tuple[list[int], str | None]]:
    """What each request gets alone."""
    found = {name: one(model, sampling) for name, sampling in mixed().items()}
    return {name: (output.token_ids, output.finish_reason) for name, output in found.items()}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_batch_equals_each_request_alone(model: Path, expected: dict[str, Any], mode: tuple[int, int]) -> None:
    found = run(make(model, "reference", *mode), **mixed())
    assert {name: (output.token_ids, output.finish_reason) for name, output in found.items()} == expected


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_preemption_changes_no_token(model: Path, expected: dict[str, Any], mode: tuple[int, int]) -> None:
    """KV room for 5 blocks of 16 tokens."""
    engine = make(model, "reference", *mode, kv_memory_bytes=5 * BLOCK_BYTES, max_context=80)
    found = run(engine, **mixed())
    assert engine.scheduler.preemptions > 0
    assert {name: (output.token_ids, output.finish_reason) for name, output in found.items()} == expected


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_abort_leaves_the_others_alone(model: Path, expected: dict[str, Any], mode: tuple[int, int]) -> None:
    """While it is compiled, while it waits, and in every step of its run."""
    engine = make(model, "reference", *mode)
    for name, sampling in mixed().items():
        engine.add(name, [1, 2, 3], sampling)
    found: dict[str, list[SequenceOutput]] = {}
    for step in range(2000):
        if step < 40:
            engine.add(f"doomed{step}", [1, 2], params("regex", f"[a-z]{{{step + 60}}}"))
        engine.abort(f"doomed{step - step % 7}")
        if step == 60:
            for index in range(40):
                engine.abort(f"doomed{index}")
        for output in engine.step() if engine.busy else []:
            found.setdefault(output.request_id, []).append(output)
    assert not engine.busy and engine.pool.free == engine.pool.total
    for name, (tokens, reason) in expected.items():
        whole = SequenceOutput.join(found[name])
        assert (whole.token_ids, whole.finish_reason) == (tokens, reason), name


def test_steps_without_a_grammar_stay_ahead_of_one_that_was(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a grammar is begun before the tokens of the one before are collected, its masks come between its two
    halves, and once it is over nothing is different from before."""
    engine = make(model, "reference", 1, 4)
    log: list[str] = []
    for what in ("submit", "begin", "end", "collect"):
        method = getattr(engine.runner, what)
        monkeypatch.setattr(engine.runner, what, lambda *a, w=what, m=method: (log.append(w), m(*a))[1])
    fill = engine._masks.fill
    monkeypatch.setattr(engine._masks, "fill", lambda *a: (log.append("masks"), fill(*a))[1])
    engine.add("g", [1, 2, 3], params("regex", "ab"))
    finish(engine)
    # Nothing was in flight at the first: the masks are made beside it, by another thread.
    again = ["begin", "collect", "masks", "end"]
    assert sorted(log[:3]) == ["begin", "end", "masks"] and log[3:] == [*again, *again, "collect"]
    del log[:]
    engine.add("p", [1, 2, 3], params(max_tokens=3))
    finish(engine)
    monkeypatch.undo()
    assert [what for what in log if what in ("submit", "collect")] == [
        *("submit", "submit", "collect"),
        *("submit", "collect", "collect"),
    ]
    assert "masks" not in log


def test_a_bad_grammar_is_an_error_of_its_request_alone(model: Path) -> None:
    engine = make(model)
    bad = {
        "regex": params("regex", "a("),
        "schema": params("json_schema", {"not": {}}),
        "none": params("json_schema", "{"),
        "lark": params("lark", "start: nothing"),
        "gbnf": params("gbnf", "root ::= ("),
        "choice": params("choice", "[]"),
        "large": params("regex", "a" * 300_000),
        "impossible": params("json_schema", {"enum": []}),
        "out of range": params("lark", "start: <[310]>"),
    }
    outputs = run(engine, **bad, good=params("regex", "a{9}"), plain=params(max_tokens=4, stop_token_ids=()))
    for name in bad:
        assert outputs[name].finish_reason == "error" and outputs[name].token_ids == [], name
        assert (outputs[name].error or "").startswith("grammar: "), outputs[name].error
    assert text_of(outputs["good"].token_ids) == "a" * 9 and len(outputs["plain"].token_ids) == 4


def test_a_text_that_no_token_goes_on_with(model: Path) -> None:
    """A language without texts is found when its first token is chosen."""
    outputs = run(make(model), bad=params("regex", r"a[^\s\S]"), good=params("regex", "aa"))
    assert outputs["bad"].finish_reason == "error", outputs["bad"]
    assert text_of(outputs["good"].token_ids) == "aa"


def test_an_engine_without_a_tokenizer_refuses_by_name(model: Path) -> None:
    engine = Engine(make(model).runner)
    with pytest.raises(RequestError, match="grammar: given; accepted: nothing"):
        engine.add("a", [1], params("regex", "a"))
    assert not engine.busy
    engine.add("a", [1], params(thinking=Thinking((END_THINK,), budget=2), max_tokens=5))
    assert END_THINK in finish(engine)["a"].token_ids


# ---- thinking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("marker", [(END_THINK,), tuple(byte_ids("</t>")), tuple(byte_ids("aab"))], ids=str)
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_budget_forces_the_end(model: Path, marker: tuple[int, ...], budget: int) -> None:
    never = {"logit_bias": dict.fromkeys(marker, -100.0), "stop_token_ids": ()}
    output = one(model, params(thinking=Thinking(marker, budget=budget), max_tokens=30, **never))
    assert tuple(output.token_ids[budget : budget + len(marker)]) == marker
    assert not {*output.token_ids[:budget], *output.token_ids[budget + len(marker) :]} & {*marker}
    assert len(output.token_ids) == 30


@pytest.mark.parametrize(
    ("marker", "budget"),
    [(marker, budget) for marker in ((END_THINK,), tuple(byte_ids("</t>"))) for budget in (0, 6)]
    + [((END_THINK,), None), (tuple(byte_ids("aa")), None)],
    ids=str,
)
def test_a_grammar_begins_after_the_marker(model: Path, marker: tuple[int, ...], budget: int | None) -> None:
    """The model thinks freely, then the text holds from its first token on, and no end comes between."""
    # Without a budget it finds the marker by itself, whose tokens it likes.
    given = {"logit_bias": {EOS: 9.0, **dict.fromkeys(marker, 32.0 if budget is None else -100.0)}}
    sampling = params(
        "regex", "[xyz]{5}", thinking=Thinking(marker, budget=budget), max_tokens=250, temperature=6.0, **given
    )
    outputs = run(make(model), **{str(s): msgspec.structs.replace(sampling, seed=s) for s in range(6)})
    for output in outputs.values():
        at = next(i for i in range(250) if tuple(output.token_ids[i : i + len(marker)]) == marker)
        assert at == budget or budget is None
        assert re.fullmatch("[xyz]{5}", text_of(output.token_ids[at + len(marker) :]))
        assert EOS not in output.token_ids and output.finish_reason == "stop"
    assert budget is not None or max(len(output.token_ids) for output in outputs.values()) > len(marker) + 6


def test_thinking_that_the_model_opens_or_not(model: Path) -> None:
    """Where the prompt does not open it: the grammar holds from the first token that is not the marker's."""
    thinking = Thinking((END_THINK,), inside=False, budget=4, begin=(THINK,))
    opens = one(model, params("regex", "[xyz]{5}", thinking=thinking, logit_bias={THINK: 60.0, END_THINK: -90.0}))
    assert opens.token_ids[0] == THINK and opens.token_ids[5] == END_THINK
    assert re.fullmatch("[xyz]{5}", text_of(opens.token_ids[6:]))
    does_not = one(model, params("regex", "[xyz]{5}", thinking=thinking, logit_bias={THINK: -90.0}))
    assert re.fullmatch("[xyz]{5}", text_of(does_not.token_ids))
    free = one(model, params(thinking=thinking, max_tokens=12, logit_bias={THINK: 60.0, END_THINK: -90.0}))
    assert free.token_ids[:6] == [THINK] * 5 + [END_THINK]
    tags = Thinking(tuple(byte_ids("</t>")), inside=False, budget=2, begin=tuple(byte_ids("<t>")))
    spelled = one(model, params("regex", "[xyz]{5}", thinking=tags, logit_bias={byte_ids("<")[0]: 60.0}))
    assert re.fullmatch(r"<t>..?</t>[xyz]{5}", text_of(spelled.token_ids), re.DOTALL)


def test_a_spent_budget_costs_no_masks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the marker's steps, and those that may be them, have masks."""
    engine = make(model)
    masked: list[int] = []
    end = engine.runner.end
    monkeypatch.setattr(
        engine.runner, "end", lambda masks, logprobs: (masked.append(len(masks)), end(masks, logprobs))[1]
    )
    engine.add("a", [1], params(thinking=Thinking(tuple(byte_ids("</t>")), budget=5), max_tokens=40, stop_token_ids=()))
    finish(engine)
    assert masked.count(1) == 4


CONSTRAINTS = {
    "regex": params("regex", "[ab]{2}c{3}[de]+"),
    "schema": params("json_schema", SCHEMAS["nested"]),
    "thinking, then a grammar": params("regex", "[ab]{30}", thinking=Thinking(tuple(byte_ids("</t>")), budget=6)),
    "opened by itself": params(
        "regex", "[ab]{30}", thinking=Thinking((END_THINK,), inside=False, budget=5, begin=(THINK,))
    ),
    "budget": params(thinking=Thinking(tuple(byte_ids("aab")), budget=9)),
}


def fresh(sampling: SamplingParams) -> Constraint:
    compiler = grammar_model.compiler()
    matcher = compiler.matcher(sampling.grammar) if sampling.grammar else None
    return Constraint(sampling, matcher, compiler.end, compiler.tokenizer.vocab_size)


def allowed(constraint: Constraint) -> list[int]:
    row = np.zeros(-(-grammar_model.VOCAB // 32), np.uint32)
    constraint.allowed(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[: grammar_model.VOCAB]).tolist()


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_drafts_are_accepted_as_far_as_they_go_and_taken_back(name: str) -> None:
    """As speculation uses a constraint: it then is as one that has only ever seen what was kept."""
    rng, kept = np.random.default_rng(len(name)), list[int]()
    constraint = fresh(CONSTRAINTS[name])
    for _ in range(60):
        draft: list[int] = []
        follows = fresh(CONSTRAINTS[name])
        assert follows.accept(kept) == len(kept)
        assert allowed(constraint) == allowed(follows), kept
        assert constraint.forced() == follows.forced()
        good = int(rng.integers(0, 5))
        while len(draft) < good and not follows.finished:
            options = allowed(follows)
            draft.append(int(rng.choice(options)))
            assert follows.accept(draft[-1:]) == 1
        forbidden = sorted({*range(grammar_model.VOCAB)} - {*allowed(follows)})
        bad = [int(rng.choice(forbidden)), EOS] if forbidden else []
        taken = constraint.accept(draft + bad)
        assert taken == len(draft)
        assert constraint.finished is follows.finished
        back = int(rng.integers(0, taken + 1))
        constraint.rollback(back)
        kept += draft[: taken - back]
        if constraint.finished:
            assert constraint.accept([kept[-1]]) == 0
            constraint.rollback(1)
            kept.pop()


def test_what_must_come_next_needs_no_model() -> None:
    constraint = fresh(params("regex", "abcdef|abx"))
    forced = constraint.forced()
    assert forced and constraint.accept(forced) == len(forced), "llguidance may tell fewer than there are"
    assert text_of(forced) == "ab"[: len(text_of(forced))]


@pytest.mark.parametrize(
    ("thinking", "message"),
    [
        (Thinking(()), "thinking.end: no token ids"),
        (Thinking((320,)), r"thinking.end\[0\]: 320; accepted: ids from 0 to 319"),
        (Thinking((1,), begin=(1, -1)), r"thinking.begin\[1\]: -1"),
        (Thinking((1,), budget=-1), "thinking.budget: -1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(model: Path, thinking: Thinking, message: str) -> None:
    engine = make(model, "reference")
    with pytest.raises(RequestError, match=message):
        engine.add("bad", [1], params(thinking=thinking))
    assert not engine.busy


# ---- what goes wrong while a grammar is compiled ---------------------------------------------------


class _Panic(BaseException):
    """As faults of libraries in Rust arrive: no Exception."""


@pytest.mark.parametrize("fault", [_Panic("the library gave up"), MemoryError(), KeyError("model"), ValueError("no")])
def test_a_fault_of_the_compiler_is_the_request_s_own(
    model: Path, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model)
    compiler = engine._compiler
    assert compiler is not None
    lease = compiler.lease

    def broken(grammar: Grammar, user: object) -> Any:
        if grammar.text == "b":
            raise fault
        return lease(grammar, user)

    monkeypatch.setattr(compiler, "lease", broken)
    outputs = run(engine, broken=params("regex", "b"), right=params("regex", "a"), free=params(max_tokens=3))
    assert outputs["broken"].finish_reason == "error" and type(fault).__name__ in (outputs["broken"].error or "")
    assert text_of(outputs["right"].token_ids) == "a" and len(outputs["free"].token_ids) == 3


def test_an_aborted_request_leaves_no_grammar_to_compile(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that ask and go away do not keep the others' grammars waiting."""
    engine = make(model)
    compiler, compiled, gate = engine._compiler, list[str](), threading.Event()
    assert compiler is not None
    lease = compiler.lease

    def slow(grammar: Grammar, user: object) -> Any:
        compiled.append(grammar.text)
        gate.wait(10)
        return lease(grammar, user)

    monkeypatch.setattr(compiler, "lease", slow)
    for n in range(20):
        engine.add(str(n), [1], params("regex", f"a{{{n + 1}}}"))
        engine.abort(str(n))
    engine.add("last", [1], params("regex", "b"))
    gate.set()
    assert text_of(finish(engine)["last"].token_ids) == "b"
    assert len(compiled) <= 3, "two threads had begun"


class User:
    """Somebody who uses a matcher."""


def test_users_of_a_grammar_have_lexers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that share one wait for each other in every step; whoever comes later finds those of users who are gone."""
    monkeypatch.setattr(grammar_module, "_SECONDS", 60.0)
    compiler = grammar_module.Compiler(lambda: grammar_model.compiler().tokenizer)
    grammar, users = Grammar("regex", "[a-f]{3}"), [User() for _ in range(20)]
    leases = [compiler.lease(grammar, user) for user in users]
    lexers = {lexer for _, lexer in leases}
    assert len(lexers) == 20 and compiler.lease(Grammar("regex", "x"), users[0])[1] not in lexers
    for n, (matcher, _) in enumerate(leases):
        for byte in byte_ids(f"{n:03x}".translate(str.maketrans("0123456789", "abcdefabcd"))):
            assert matcher.try_consume_tokens([byte]) == 1, "each goes its own way"
    del users, leases
    first, second = User(), User()
    found = {compiler.lease(grammar, user)[1] for user in (first, second)}
    assert len(found) == 2 and found < lexers, "no other was made"


def test_lexers_of_all_grammars_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_LEXERS", 5)
    compiler = grammar_module.Compiler(lambda: grammar_model.compiler().tokenizer)
    users = [User() for _ in range(12)]
    for text in ("a", "b", "c"):
        shared = Counter(compiler.lease(Grammar("regex", text), user)[1] for user in users)
        assert sorted(shared.values()) == [2, 2, 2, 3, 3]
    assert [grammar.text for grammar in compiler._cache] == ["b", "c"]
    assert compiler._cached_characters == 10


def test_lexers_of_a_grammar_are_bounded_by_time_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes when there are as many as may be shares one with as few as possible."""
    compiler = grammar_module.Compiler(lambda: grammar_model.compiler().tokenizer)
    users = [User() for _ in range(20)]
    monkeypatch.setattr(grammar_module, "_SECONDS", 0.0)
    assert len({compiler.lease(Grammar("regex", "[a-f]{3}"), user)[1] for user in users}) == 1
    monkeypatch.setattr(grammar_module, "_SECONDS", 60.0)
    monkeypatch.setattr(grammar_module, "CACHED_CHARACTERS", 20 * 40)
    shared = Counter(compiler.lease(Grammar("regex", "(ab|cd|ef){2} and so on"), user)[1] for user in users)
    assert 2 <= len(shared) < 20 and max(shared.values()) - min(shared.values()) <= 1
    assert compiler._cached_characters <= 20 * 40


def test_what_is_kept_of_grammars_is_bounded_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "CACHED_CHARACTERS", 40)
    compiler = grammar_module.Compiler(lambda: grammar_model.compiler().tokenizer)
    for text in ("a" * 10, "b" * 10, "a" * 10, "c" * 25):
        compiler.matcher(Grammar("regex", text))
    assert [grammar.text for grammar in compiler._cache] == ["a" * 10, "c" * 25]
    assert compiler._cached_characters == 35
