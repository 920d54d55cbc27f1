"""What becomes of an answer depends on its text alone: on no grouping of its tokens, and on no way to spell it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.engine.messages import SequenceOutput
from atlas.parsers import MARKERS, TOOL_FORMATS, AnswerParser, CallEnd, Content, Event, collect
from atlas.parsers.events import joined
from atlas.serve.answer_assembler import AnswerAssembler
from tests.parsers.parsing import TOOLS

END = -1
FORMATS = {
    "hermes": ["<tool_call>", '{"name": "now", "arguments": {}}', '{"name": "f", "arguments": {"ä": 1', "</tool_call>"],
    "qwen3_coder": ["<tool_call>", "<function=f>", "<parameter=ä>", "1", "</parameter>", "</function>", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]", "now[ARGS]{}", '[{"name": "f", "arguments": {"ä": 1}}]', "f[ARGS]{"],
    "glm": ["<tool_call>", "f\n", "<arg_key>ä</arg_key>", "<arg_value>1</arg_value>", "</tool_call>"],
    "gemma": ["<|tool_call>", "call:f{ä:1}", "call:now{", "<tool_call|>"],
}
STOPS = ("STOP", "OPS", "\n\n", "}")
PIECES = ["a", "é😀", " ", "\n", "\n\n", "STOP", "ST", "OPS", "}", "<", "<think>", "</think>", "<tool"]


class Spelled:
    """A detokenizer to which id n is the n-th of these pieces."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)

    def finish(self) -> str:
        return ""


def assemble(
    text: str, cuts: set[int], groups: set[int], name: str, stops: Sequence[str], *, inside: bool, one_call: bool
) -> tuple[list[Event], int, int, str]:
    """The joined events, tokens, tokens of reasoning and the reason of a text.

    cuts: where its tokens end.  groups: after which tokens an output ends.
    """
    ends = [*sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    counter = itertools.count()
    parser = AnswerParser(
        TOOL_FORMATS[name], TOOLS, MARKERS["think"], inside=inside, new_id=lambda: f"id{next(counter)}"
    )
    assembler = AnswerAssembler(Spelled(pieces), parser, stops, one_call=one_call)
    events: list[Event] = []
    tokens, begin = 0, 0
    for end in [*sorted(group for group in groups if group < len(pieces)), len(pieces)]:
        last = end == len(pieces)
        ids = [*range(begin, end), *([END] if last else [])]
        new, count, reason = assembler.push(SequenceOutput("r", ids, "stop" if last else None))
        events, tokens, begin = events + new, tokens + count, end
        if reason is not None:
            return joined(events), tokens, assembler.reasoning_tokens, reason
    raise AssertionError("it has no end")


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str]:
    name = draw(st.sampled_from(sorted(FORMATS)))
    whole = "".join(FORMATS[name])
    pieces = st.lists(st.sampled_from([*PIECES, *FORMATS[name], whole, whole]), max_size=12)
    return name, "".join(draw(pieces))


_PLACES = st.sets(st.integers(0, 200), max_size=40)


@settings(max_examples=150, deadline=None)
@given(answers(), _PLACES, _PLACES, st.lists(st.sampled_from(STOPS), max_size=2), st.booleans(), st.booleans())
def test_grouping_and_spelling_change_nothing(
    answer: tuple[str, str], cuts: set[int], groups: set[int], stops: list[str], inside: bool, one_call: bool
) -> None:
    name, text = answer
    single = assemble(text, cuts, set(range(1, 300)), name, stops, inside=inside, one_call=one_call)
    assert single == assemble(text, cuts, groups, name, stops, inside=inside, one_call=one_call)
    assert single == assemble(text, cuts, set(), name, stops, inside=inside, one_call=one_call)
    characters = assemble(text, set(range(300)), set(), name, stops, inside=inside, one_call=one_call)
    assert (single[0], single[3]) == (characters[0], characters[3])


@settings(max_examples=150, deadline=None)
@given(answers(), st.lists(st.sampled_from(STOPS), max_size=2), st.booleans())
def test_stop_strings_cut_what_would_be_there_without(answer: tuple[str, str], stops: list[str], inside: bool) -> None:
    """Up to the first stop string in one stretch of content, the events are those of the same answer without any."""
    name, text = answer
    whole = assemble(text, set(), set(), name, (), inside=inside, one_call=False)[0]
    found = assemble(text, set(), set(), name, stops, inside=inside, one_call=False)[0]
    expected: list[Event] = []
    for event in whole:
        if isinstance(event, Content) and any(stop in event.text for stop in stops):
            # The one that ends first, and of those the longest.
            end = min(event.text.index(stop) + len(stop) for stop in stops if stop in event.text)
            begin = min(end - len(stop) for stop in stops if event.text[:end].endswith(stop))
            expected.append(Content(event.text[:begin]))
            break
        expected.append(event)
    assert found == [event for event in expected if event != Content("")]


@settings(max_examples=100, deadline=None)
@given(answers())
def test_one_call_is_the_first_complete_one(answer: tuple[str, str]) -> None:
    name, text = answer
    whole = assemble(text, set(), set(), name, (), inside=False, one_call=False)[0]
    found = assemble(text, set(), set(), name, (), inside=False, one_call=True)[0]
    ends = [place for place, event in enumerate(whole) if isinstance(event, CallEnd) and event.complete]
    assert found == (whole[: ends[0] + 1] if ends else whole)
    assert sum(call.complete for call in collect(found).calls) == bool(ends)
