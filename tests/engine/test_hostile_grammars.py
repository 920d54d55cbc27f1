"""Grammars made to cost much while they are followed: each is cheap, or ends its own request; others are unharmed.

What is expensive to compile never gets here (tests/clients/test_hostile_schemas.py)."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.engine import compilations, constraint
from atlas.engine.constraint import Constraint, Masks
from atlas.engine.engine import Engine
from atlas.engine.grammar import LIMITS
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.engine.sampling import Grammar, Thinking
from tests import tiny_model
from tests.engine.grammar_model import END_THINK, EOS, EOT, byte_ids, compiler, make, text_of

A = byte_ids("a")[0]
COUNTED = 2000
HOSTILE: dict[str, tuple[str, str, str]] = {
    # syntax, text, what the model writes where it may
    "deep recursion": ("lark", 'start: "a" start "b" | "x"', "a"),
    "left recursion": ("lark", 'start: start "a" | "a"', "a"),
    "right recursion": ("lark", 'start: "a" start | "a"', "a"),
    "ambiguous": ("lark", 'start: start start | "a"', "a"),
    "more ambiguous": ("lark", 'start: start start start | start start | "a"', "a"),
    "nothing, many times": ("lark", 'start: x x x x x x x x\nx: x x | "a" |', "a"),
    "stars": ("lark", 'start: s\ns: s* s* | s* "b" "b" | "a"', "a"),
    "rules to choose from": (
        "lark",
        "start: "
        + " | ".join(f"r{i}" for i in range(1000))
        + "".join(f'\nr{i}: "a" r{(7 * i + 1) % 1000} | "a" r{(13 * i + 5) % 1000} | "b"' for i in range(1000)),
        "a",
    ),
    "optional parts": ("lark", "start: " + ' ("a" | "b" "c"?)?' * 1000, "a"),
    "counted": ("regex", f"(a|b|ab){{1,{COUNTED}}}", "a"),
    "counted in counted": ("regex", "(([a-z]{1,30} ){1,30}\\n){1,30}", "a"),
    "states without end": ("regex", "(.|\\n)*a(.|\\n){40}", "a"),
    "patterns at once": ("lark", "start: T\nT: ~/(.|\\n)*a(.|\\n){12}b(.|\\n)*/ & /[ab]*a[ab]{12}[ab]*/", "a"),
    "words that overlap": (
        "lark",
        "start: x*\nx: A B? | B A? | A C\nA: /[a-z]{1,99}/\nB: /[a-y]{1,99}/\nC: /[b-z]+/",
        "",
    ),
    "any JSON": ("json_schema", "{}", "["),
    "JSON in itself": (
        "json_schema",
        json.dumps(
            {
                "$defs": {
                    "n": {"anyOf": [{"type": "integer"}, *[{"type": "array", "items": {"$ref": "#/$defs/n"}}] * 3]}
                },
                "$ref": "#/$defs/n",
            }
        ),
        "[",
    ),
    "a long string": ("json_schema", json.dumps({"type": "string", "maxLength": 60_000}), "a"),
    "members to choose from": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(450)}, "additionalProperties": False}),
        "",
    ),
}
USUAL: dict[str, Grammar] = {
    "5,000 choices": Grammar("choice", json.dumps([f"label number {i}" for i in range(5000)])),
    "choices that begin alike": Grammar("choice", json.dumps(["a", "ab", "abc", "", 'a"b\\'])),
    "300 kinds of objects": Grammar(
        "json_schema",
        json.dumps(
            {
                "type": "array",
                "items": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {"name": {"const": f"f{i}"}, "text": {"type": "string", "maxLength": 20 + i}},
                            "required": ["name", "text"],
                            "additionalProperties": False,
                        }
                        for i in range(300)
                    ]
                },
            }
        ),
    ),
    "members that may be there": Grammar(*HOSTILE["members to choose from"][:2]),  # type: ignore[arg-type]
    "arithmetic": Grammar(
        "lark", 'start: t (("+"|"-") t)*\nt: f (("*"|"/") f)*\nf: N | "(" start ")" | "-" f\nN: /[0-9]+/'
    ),
}


def follow(grammar: Grammar, wish: str, tokens: int, used: Callable[[float], None] = lambda _: None) -> Constraint:
    """The constraint after so many tokens: those of `wish` where they are allowed, else at random."""
    matcher, vocab = compiler().matcher(grammar), compiler().tokenizer.vocab_size
    followed = Constraint(SamplingParams(max_tokens=1), matcher, compiler().end, vocab)
    masks, row, chance = Masks(), np.zeros((1, -(-vocab // 32)), np.uint32), random.Random(1)
    wished = byte_ids(wish)[0] if wish else -1
    for _ in range(tokens):
        began = time.process_time()
        masks.fill(row, [followed], vocab)
        used(time.process_time() - began)
        if followed.finished or followed.fault:
            break
        allowed = np.flatnonzero(np.unpackbits(row[0].view(np.uint8), bitorder="little"))
        went = [token for token in allowed.tolist() if token not in (EOS, EOT)]
        if not went:
            break
        token = wished if wished in went else chance.choice(went)
        began = time.process_time()
        followed.accept((token,))
        used(time.process_time() - began)
    return followed


def resident() -> int:
    """Bytes of memory that this process has."""
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


SLOW = ("more ambiguous", "nothing, many times", "stars")
"""Of a kind that costs seconds; the default run has another one."""


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in SLOW])
def test_it_takes_little_or_ends(name: str) -> None:
    takes_little_or_ends(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLOW)
def test_so_do_these(name: str) -> None:
    takes_little_or_ends(name)


def takes_little_or_ends(name: str) -> None:
    syntax, text, wish = HOSTILE[name]
    times: list[float] = []
    before = resident()
    followed = follow(Grammar(syntax, text), wish, 600, times.append)  # type: ignore[arg-type]
    assert max(times) < 0.5, "one step"
    assert sum(sorted(times)[-20:]) < 2.5, "the worst of them together"
    assert sum(times) < 10
    assert resident() - before < 64 << 20
    if followed.fault:
        assert any(
            word in followed.fault for word in ("too ambiguous", "Too many items", "row has", "too many", "NoExtension")
        ), followed.fault


def test_ten_thousand_levels() -> None:
    before, times = resident(), list[float]()
    followed = follow(Grammar("json_schema", "{}"), "[", 10_000, times.append)
    assert not followed.fault and sum(times) < 5 and resident() - before < 16 << 20


@pytest.mark.parametrize("name", USUAL)
def test_what_is_usual_is_no_fault(name: str) -> None:
    times: list[float] = []
    for _ in range(3):
        followed = follow(USUAL[name], "", 300, times.append)
        assert not followed.fault
        assert followed._charged < constraint._MASK_SECONDS / 4


def test_each_choice_can_be_made() -> None:
    for choice in ("a", "ab", "abc", 'a"b\\'):
        matcher, vocab = compiler().matcher(USUAL["choices that begin alike"]), compiler().tokenizer.vocab_size
        followed = Constraint(SamplingParams(max_tokens=1, stop_token_ids=(EOS,)), matcher, compiler().end, vocab)
        assert followed.accept(byte_ids(choice)) == len(choice)
        assert followed.finished or followed.accept((EOS,)) == 1
    assert not Constraint(SamplingParams(max_tokens=1), matcher, compiler().end, vocab).accept(byte_ids("b"))


# ---- in an engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


def params(grammar: Grammar | None = None, **given: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, **{"max_tokens": 60, "temperature": 1.0, "seed": 5, **given})


def finish(engine: Engine, seconds: float = 20.0) -> dict[str, SequenceOutput]:
    """Step until nothing is left."""
    outputs: dict[str, list[SequenceOutput]] = {}
    end = time.monotonic() + seconds
    while engine.busy:
        assert time.monotonic() < end, engine.stats()
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return {name: SequenceOutput.join(parts) for name, parts in outputs.items()}


@pytest.mark.parametrize("how", ["too slow", "too many items"])
def test_only_the_request_whose_grammar_it_is_ends(model: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {
        "schema": params(Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "boolean"}}))),
        "free": params(),
    }

    def run(hostile: Grammar | None) -> tuple[Engine, dict[str, SequenceOutput]]:
        engine = make(model)
        if hostile is not None:
            engine.add("hostile", [1], params(hostile, logit_bias={A: 100.0}, max_tokens=200))
        for name, sampling in others.items():
            engine.add(name, [1, 2], sampling)
        return engine, finish(engine)

    _, alone = run(None)
    name = "more ambiguous" if how == "too slow" else "optional parts"
    monkeypatch.setattr(constraint, "_MASK_SECONDS", 0.02)  # soon
    monkeypatch.setattr(constraint, "_SLOW", 0.003)
    syntax, text, _ = HOSTILE[name]
    engine, outputs = run(Grammar(syntax, text))  # type: ignore[arg-type]
    ended = outputs.pop("hostile")
    assert ended.finish_reason == "error" and ended.by_grammar and ended.error is not None
    assert ended.error.startswith("the grammar (lark start: ")
    assert ("too ambiguous" if how == "too slow" else "row has") in ended.error
    assert {name: output.token_ids for name, output in outputs.items()} == {
        name: output.token_ids for name, output in alone.items()
    }
    assert engine.stats().work.grammar_errors == 1 and engine.stats().work.masks > 0


@pytest.mark.parametrize("thinking", [None, Thinking(end=(END_THINK,), budget=3)])
def test_what_others_have_filled_is_nobody_s_fault(
    model: Path, thinking: Thinking | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of one grammar share the states of its words, and so how many there may be."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 300)
    grammar, engine = Grammar("regex", "(.|\\n)*a(.|\\n){37}"), make(model)

    def ask(tokens: int, seed: int) -> SequenceOutput:
        engine.add("x", [1], params(grammar, seed=seed, max_tokens=tokens, thinking=thinking, logit_bias={A: 4.0}))
        return finish(engine)["x"]

    made = []
    for seed in range(40):
        made.append(ask(20, seed))
        assert made[-1].finish_reason == "length", made[-1].error
    assert engine._compiler is not None
    for seed in (0, 39):
        engine._compiler.forget(grammar)
        assert ask(20, seed).token_ids == made[seed].token_ids, "the same as with a lexer of its own"


@pytest.mark.parametrize("aborted", [False, True])
def test_a_grammar_that_never_compiles_keeps_no_other_waiting(
    model: Path, aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilations, "SECONDS", 0.3)
    engine, gate = make(model), threading.Event()
    assert engine._compiler is not None
    lease = engine._compiler.lease

    def stuck(grammar: Grammar, user: object) -> Any:
        if grammar.text.startswith("(stuck)"):
            gate.wait(30)
        return lease(grammar, user)

    monkeypatch.setattr(engine._compiler, "lease", stuck)
    try:
        for number in range(3):
            engine.add(f"stuck {number}", [1], params(Grammar("regex", f"(stuck){{{number + 1}}}")))
        engine.add("right", [1], params(Grammar("regex", "ab")))
        assert engine.stats().waiting == 4, "an engine that waits for a grammar is not idle"
        if aborted:
            for number in range(3):
                engine.abort(f"stuck {number}")
        outputs = finish(engine)
    finally:
        gate.set()
    assert text_of(outputs.pop("right").token_ids) == "ab"
    assert len(outputs) == (0 if aborted else 3)
    for output in outputs.values():
        assert output.by_grammar and "not compiled after 0.3 s" in (output.error or "")
