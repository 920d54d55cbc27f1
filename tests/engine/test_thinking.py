"""Thinking that ends, alone and before a grammar; and drafts, which are accepted as far as they are allowed."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from atlas.engine.constraint import Constraint
from atlas.engine.messages import SamplingParams
from atlas.engine.sampling import Thinking
from atlas.errors import RequestError
from tests import tiny_model
from tests.engine import grammar_model
from tests.engine.grammar_model import END_THINK, EOS, THINK, byte_ids, make, text_of
from tests.engine.grammar_requests import finish, one, params, run
from tests.engine.schemas import SCHEMAS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


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
