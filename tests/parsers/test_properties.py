"""What holds for any text: no split matters, nothing raises, what is no call stays as it is, little is held."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.parsers import MARKERS, TOOL_FORMATS, AnswerParser, CallArguments, CallEnd, Content, Event, Reasoning
from atlas.parsers.answer import MOST_REST
from atlas.parsers.cursor import MOST_HELD
from tests.parsers.parsing import TOOLS, events_of
from tests.parsers.soups import WORDS, soups

FORMATS = sorted(TOOL_FORMATS)


@st.composite
def split_soups(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(soups())
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(soup=split_soups(), markers=st.sampled_from(["", *sorted(MARKERS)]), inside=st.booleans())
def test_no_split_matters_and_calls_are_well_formed(
    name: str, soup: tuple[str, list[str]], markers: str, inside: bool
) -> None:
    text, pieces = soup
    whole = events_of([text], name, markers, inside=inside)
    assert events_of(pieces, name, markers, inside=inside) == whole
    assert events_of(text, name, markers, inside=inside) == whole
    _check_calls(whole)


def _check_calls(events: list[Event]) -> None:
    """Each call begins, has its arguments and ends before anything else comes."""
    arguments = ""
    for event in events:
        if isinstance(event, CallArguments):
            arguments += event.text
        elif isinstance(event, CallEnd):
            if event.complete:
                assert isinstance(json.loads(arguments), dict)
            else:
                assert not arguments.endswith("}") or json.loads(arguments + "}")
            arguments = ""
        else:
            assert arguments == ""


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_text_without_calls_stays_as_it_is(name: str, text: str) -> None:
    assert events_of([text], name) == ([Content(text)] if text else [])


@settings(max_examples=100, deadline=None)
@given(text=soups())
def test_without_tools_and_reasoning_all_is_content(text: str) -> None:
    assert events_of([text]) == ([Content(text)] if text else [])


@settings(max_examples=200, deadline=None)
@given(reasoning=soups(), content=soups())
def test_reasoning_is_all_before_its_end(reasoning: str, content: str) -> None:
    """With the marker in neither part, both come back, but for white space beside the marker."""
    reasoning, content = reasoning.replace("think>", "").strip(), content.replace("think>", "").strip()
    events = events_of([f"<think>\n{reasoning}\n</think>\n\n{content}"], "", "think")
    space = " \t\r\n"
    expected: list[Event] = [Reasoning(reasoning.strip(space))] if reasoning else []
    assert events == expected + ([Content(content.strip(space))] if content else [])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(arguments=st.dictionaries(st.text(), _JSON, max_size=4), ascii_only=st.booleans(), size=st.integers(1, 9))
def test_any_arguments_arrive_unchanged(arguments: dict[str, object], ascii_only: bool, size: int) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    frames = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{written}",
        "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{written}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }
    for name, text in frames.items():
        events = events_of([text[at : at + size] for at in range(0, len(text), size)], name)
        assert isinstance(events[1], CallArguments) and events[1].text == written
        assert events[2:] == [CallEnd(0)]


@settings(max_examples=200, deadline=None)
@given(value=st.text(), name=st.sampled_from(["qwen3_coder", "minimax", "glm", "deepseek_v32", "gemma"]))
def test_any_string_arrives_unchanged(value: str, name: str) -> None:
    """Where strings stand as they are, each but one with the closing tag in it comes back."""
    frames = {
        "qwen3_coder": f"<tool_call><function=write_file><parameter=content>\n{value}\n</parameter>"
        "</function></tool_call>",
        "minimax": f'<minimax:tool_call><invoke name="write_file"><parameter name="content">\n{value}\n</parameter>'
        "</invoke></minimax:tool_call>",
        "glm": f"<tool_call>write_file<arg_key>content</arg_key><arg_value>{value}</arg_value></tool_call>",
        "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="write_file"><｜DSML｜parameter name="content" '
        f'string="true">{value}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
        "gemma": f'<|tool_call>call:write_file{{content:<|"|>{value}<|"|>}}<tool_call|>',
    }
    events = events_of([frames[name]], name)
    assert isinstance(events[1], CallArguments) and json.loads(events[1].text) == {"content": value}
    assert events[2:] == [CallEnd(0)]


@pytest.mark.parametrize("name", FORMATS)
def test_little_is_held_back(name: str) -> None:
    """What a piece costs is bounded by what is unread before it: time is linear in the text for any text."""
    form = TOOL_FORMATS[name]
    for word in sorted({*form.opens, *form.bare, *form.ends, *WORDS}):
        parser = AnswerParser(form, TOOLS, MARKERS["think"], inside=True)
        for _ in range(3):
            for piece in (*form.opens[:1], word * 200, *word, " " * 1000, "x" * 1000):
                parser.feed(piece)
                assert parser.unread < 600
        parser.finish()


def test_what_was_a_call_is_not_kept_for_giving_back() -> None:
    parser = AnswerParser(TOOL_FORMATS["hermes"])
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": 1,' + '"b": 1,' * 1000)
    assert parser._cursor.kept() is None


def test_an_argument_may_be_long_but_not_endless() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1, "b": "'
    quarter = ["x" * (MOST_HELD // 4)]
    fits = events_of([call, *quarter * 3, '"}}</tool_call>'], "hermes")
    assert fits[-1] == CallEnd(0)
    long = events_of([call, *quarter * 5, '"}}</tool_call>y'], "hermes")
    assert long == events_of([call + quarter[0] * 5 + '"}}</tool_call>y'], "hermes")
    assert long[1] == CallArguments(0, '{"a": 1')
    assert isinstance(long[2], CallEnd) and not long[2].complete and len(long[2].rest) == MOST_REST
    assert long[3:] == [Content("y")]


@pytest.mark.parametrize("name", FORMATS)
def test_time_is_linear(name: str) -> None:
    """Text that at every word seems to begin a call, and a call of very many arguments, in one piece and in many."""
    form = TOOL_FORMATS[name]
    words = [*(word * 3 + ' {"name": ' for word in (*form.opens, *form.bare)), MANY.get(name, "")]

    def seconds(count: int) -> float:
        started = time.perf_counter()
        for text in (word * count for word in words):
            events_of([text], name)
            events_of([text[at : at + 50] for at in range(0, len(text), 50)], name)
        text = form.opens[0] + HEADS[name] + MANY[name] * count if name in MANY else ""
        events_of([text], name)
        return time.perf_counter() - started

    assert min(seconds(4000) for _ in range(2)) < 8 * min(seconds(1000) for _ in range(2)) + 0.2


HEADS = {"hermes": '{"name": "f", "arguments": {', "mistral": "f[ARGS]{", "gemma": "call:f{"}
MANY = {"hermes": '"a": 1,', "mistral": '"a": 1,', "gemma": "a:1,"}
