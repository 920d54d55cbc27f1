"""Sequences with a grammar among others in an engine: batches, preemption, aborts, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.engine.sampling import Thinking
from atlas.errors import RequestError
from tests import tiny_model
from tests.engine.grammar_model import END_THINK, byte_ids, make, text_of
from tests.engine.grammar_requests import BLOCK_BYTES, MODES, finish, one, params, run
from tests.engine.schemas import SCHEMAS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


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
