"""Each family's outputs: what a client gets, in one piece and for every split."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from atlas.parsers import (
    MARKERS,
    TOOL_FORMATS,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    collect,
)
from tests.parsers.cases import CASES
from tests.parsers.parsing import Case

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format or 'reasoning'}-{case.title}")


@each_case
def test_what_is_in_it(case: Case) -> None:
    broken = case.title == "parameter without end" and case.format == "qwen3_coder"
    if broken:  # the one that is cut is not the last
        answer = collect(case.events([case.text]))
        assert [(call.name, call.arguments, call.complete) for call in answer.calls] == [
            (*case.calls[0], False),
            (*case.calls[1], True),
        ]
    else:
        case.check()


@each_case
def test_every_split_gives_the_events_of_the_whole(case: Case) -> None:
    text, whole = case.text, case.events([case.text])
    assert case.events(text) == whole
    for cut in range(1, len(text)):
        assert case.events([text[:cut], text[cut:]]) == whole, cut
    for size in (2, 3, 5, 7):
        assert case.events([text[at : at + size] for at in range(0, len(text), size)]) == whole, size
    if len(text) < 60:
        for first, second in combinations(range(len(text)), 2):
            assert case.events([text[:first], text[first:second], text[second:]]) == whole, (first, second)


@each_case
def test_every_beginning_is_honest(case: Case) -> None:
    """However early an answer ends: complete arguments are an object, others are no JSON, and none is invented."""
    full = {call.name: call.arguments for call in collect(case.events([case.text])).calls}
    for stop in range(len(case.text)):
        for call in collect(case.events([case.text[:stop]])).calls:
            if call.complete:
                assert isinstance(json.loads(call.arguments), dict)
            else:
                with pytest.raises(ValueError):
                    json.loads(call.arguments)
                assert full[call.name].startswith(call.arguments)


def test_arguments_come_as_soon_as_they_are_whole() -> None:
    parser = AnswerParser(TOOL_FORMATS["hermes"], new_id=lambda: "id")
    begun = [CallBegin(0, "id", "f"), CallArguments(0, '{"a": 1')]
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": 1, "b": "x') == begun
    assert parser.feed('"') == []
    assert parser.feed("}") == [CallArguments(0, ', "b": "x"}'), CallEnd(0)]
    assert parser.finish() == []


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    parser = AnswerParser(TOOL_FORMATS["hermes"])
    assert [parser.feed(piece) for piece in ("a <", "tool", "_box", " b ", "c")] == [
        [Content("a")],
        [],
        [Content(" <tool_box")],
        [Content(" b")],
        [Content(" c")],
    ]


def test_a_finished_parser_takes_no_more() -> None:
    parser = AnswerParser()
    parser.finish()
    assert parser.finish() == []
    with pytest.raises(ValueError, match="finished"):
        parser.feed("x")


@pytest.mark.parametrize(
    ("name", "prompt", "inside"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", True),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("think", "<|im_start|>assistant\n", False),
        ("think", "say <think> to me<|im_end|>\n<|im_start|>assistant\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
        ("gemma", "<|turn>model\n<|channel>thought\n<channel|>", False),
    ],
)
def test_whether_an_answer_begins_as_reasoning(name: str, prompt: str, inside: bool) -> None:
    assert MARKERS[name].inside(prompt) is inside


def test_ids_are_of_the_form_that_the_family_wants() -> None:
    ids = {name: TOOL_FORMATS[name].new_id() for name in ("hermes", "mistral")}
    assert ids["hermes"].startswith("call_") and len(ids["hermes"]) == 29
    assert len(ids["mistral"]) == 9 and ids["mistral"].isalnum()
