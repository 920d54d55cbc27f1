"""Half a minute of parser fuzzing, and that it would find something."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atlas.parsers import CallArguments, CallBegin, CallEnd, Content, Event
from atlas.parsers.answer import AnswerParser
from atlas.parsers.calls import Calls
from tests.parsers import fuzz
from tests.parsers.cases import CASES

TEXT = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> done'


def test_nothing_is_found(tmp_path: Path) -> None:
    counts = fuzz.fuzz(30, tmp_path)
    assert counts["hypothesis"] > 200 and min(counts.values()) > 200
    assert ("atheris" in counts) == bool(importlib.util.find_spec("atheris"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.title}")
def test_the_known_texts_keep_the_rules(case: Any) -> None:
    data = fuzz.encode(case.text, case.format, case.markers, inside=case.inside)
    text, name, markers, inside, rng = fuzz.decode(data)
    assert (text, name, markers, inside) == (case.text, case.format, case.markers, case.inside)
    fuzz.check(text, name, markers, inside, rng)


@pytest.mark.parametrize(
    "events",
    [
        [Content("never said")],
        [Content("done done")],
        [CallBegin(0, "id", "made_up"), CallArguments(0, "{}"), CallEnd(0)],
        [CallBegin(1, "id", "f"), CallArguments(1, "{}"), CallEnd(1)],
        [CallBegin(0, "id", "f"), CallArguments(0, '{"a": 2}'), CallEnd(0)],
        [CallBegin(0, "id", "f"), CallArguments(0, '{"b": 1}'), CallEnd(0)],
        [CallBegin(0, "id", "f"), CallArguments(0, '{"a": "x"}'), CallEnd(0)],
        [CallBegin(0, "id", "f"), CallArguments(0, '{"a": 1'), CallEnd(0)],
        [CallBegin(0, "id", "f"), CallArguments(0, "[]"), CallEnd(0)],
        [CallBegin(0, "id", "f"), CallArguments(0, '{"a": NaN}'), CallEnd(0)],
        [CallBegin(0, "id", "f"), CallArguments(0, '{"a": 1}'), CallEnd(0, complete=False)],
        [CallBegin(0, "id", "f"), CallArguments(0, '{"a": '), CallEnd(0, complete=False)],
        [CallBegin(0, "id", "f"), CallArguments(0, '{"a": 1}')],
        [CallBegin(0, "id", "f"), Content("done"), CallEnd(0)],
        [CallArguments(0, "{}")],
        [CallEnd(0)],
    ],
    ids=str,
)
def test_a_broken_answer_is_seen(events: list[Event]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        fuzz.check_events(events, TEXT)
    fuzz.check_events([CallBegin(0, "id", "f"), CallArguments(0, '{"a": 1}'), CallEnd(0), Content(" done")], TEXT)


def _lose_at_a_cut(self: AnswerParser, text: str) -> list[Event]:
    return _feed(self, text.rstrip(" "))


def _forget_the_brace(self: Calls) -> None:
    self.open = False
    self._events.append(CallEnd(self._index))


_feed = AnswerParser.feed


@pytest.mark.parametrize(
    ("owner", "name", "fault"), [(AnswerParser, "feed", _lose_at_a_cut), (Calls, "end", _forget_the_brace)]
)
def test_a_broken_parser_is_found_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        fuzz.with_hypothesis(300, tmp_path)  # it ends when something is found
    case = fuzz.decode((tmp_path / "hypothesis-case").read_bytes())
    with pytest.raises(AssertionError):
        fuzz.check(*case)
    monkeypatch.undo()
    fuzz.check(*case)


def test_time_that_grows_with_the_square_is_seen() -> None:
    fuzz.check_linear(lambda text: [text.upper() for _ in range(100)], "abc")
    with pytest.raises(AssertionError, match="linear"):
        fuzz.check_linear(lambda text: [text.count("z") for _ in range(len(text) // 40)], "abc")


def test_any_bytes_are_a_case() -> None:
    rng = random.Random(1)
    for size in range(40):
        text, name, markers, inside, _ = fuzz.decode(rng.randbytes(size))
        assert isinstance(text, str) and name in fuzz.FORMATS and markers in fuzz.MARKER_NAMES and inside in (0, 1)
