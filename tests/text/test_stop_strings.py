"""Stop strings: what comes out depends on the text, never on how it was cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.engine.messages import SequenceOutput
from atlas.text.assembler import Assembler
from atlas.text.stop_strings import StopMatcher
from atlas.tokenizer import Tokenizer
from atlas.weights import open_checkpoint
from tests.serve.serve_harness import EOT, SPECIAL, ids_of, make_checkpoint


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop that ends first, of those the longest; nothing clever."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = [matcher.feed(piece) for piece in pieces]
    return [*out, matcher.finish()], matcher.matched


# A small alphabet makes overlaps and false starts the rule.
texts = st.text("ab", max_size=24)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(texts, stop_lists, st.data())
def test_any_split_equals_the_definition(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out, matched = run(pieces, stops)
    assert ("".join(out), matched) == reference(text, stops)


@settings(max_examples=200, deadline=None)
@given(texts, stop_lists)
def test_holds_back_only_what_can_still_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for position, character in enumerate(text, start=1):
        shown += matcher.feed(character)
        if matcher.matched:
            return
        held = text[len(shown) : position]
        longest = max((n for stop in stops for n in range(len(stop)) if text[:position].endswith(stop[:n])), default=0)
        assert len(held) == longest


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["DEFGHIJ"], "abc"),
        (["EFX"], "abcDEFGHIJklm"),
        (["m"], "abcDEFGHIJkl"),
        (["lmX"], "abcDEFGHIJklm"),
        (["a"], ""),
        (["DEFGHIJklmn"], "abcDEFGHIJklm"),
        (["GHI", "DE"], "abc"),
    ],
)
def test_known_rows(stops: list[str], expected: str) -> None:
    for size in (1, 2, 3, 13):
        text = "abcDEFGHIJklm"
        out, _ = run([text[i : i + size] for i in range(0, len(text), size)], stops)
        assert "".join(out) == expected


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("split") / "tiny")) as checkpoint:
        return Tokenizer.from_checkpoint(checkpoint)


def assemble(tokenizer: Tokenizer, outputs: list[SequenceOutput], stops: list[str]) -> tuple[str, int, object]:
    assembler = Assembler(tokenizer.stream(), stops)
    text, tokens = "", 0
    for output in outputs:
        piece, count, reason = assembler.push(output)
        text, tokens = text + piece, tokens + count
        if reason is not None:
            return text, tokens, reason
    raise AssertionError("no finish reason")


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab😀é漢", max_size=12),
    stops=st.lists(st.text("ab😀é漢", min_size=1, max_size=4), max_size=3),
    ends=st.sampled_from(["stop", "length"]),
    cut_bytes=st.integers(0, 3),
    data=st.data(),
)
def test_grouping_of_tokens_changes_nothing(
    tokenizer: Tokenizer, text: str, stops: list[str], ends: str, cut_bytes: int, data: st.DataObject
) -> None:
    ids = ids_of(text)
    ids = ids[: len(ids) - cut_bytes] + ([EOT] if ends == "stop" else [])
    if not ids:
        return
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=6)) | {len(ids)})
    groups = [ids[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]

    def outputs(parts: list[list[int]]) -> list[SequenceOutput]:
        last = len(parts) - 1
        return [SequenceOutput("r", part, ends if i == last else None) for i, part in enumerate(parts)]  # type: ignore[arg-type]

    whole = assemble(tokenizer, outputs([ids]), stops)
    assert assemble(tokenizer, outputs(groups), stops) == whole
    decoded = tokenizer.decode([token for token in ids if token >= len(SPECIAL)])
    if not cut_bytes:
        expected, stop = reference(decoded, stops)
        assert whole[0] == expected
        assert whole[2] == ("stop" if stop else ends)
    assert whole[0].count("\ufffd") <= 1
