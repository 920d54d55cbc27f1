"""Assembler: what is shown, what is counted, and where each token's text begins."""

from __future__ import annotations

import random

import pytest

from atlas.engine.messages import SequenceOutput
from atlas.text.assembler import Assembler


class Characters:
    """Id n is the character n; 0 is a special token; ids of 1000 and more are the halves of a character."""

    def __init__(self) -> None:
        self.half = False

    def push(self, token_ids: list[int]) -> str:
        text = ""
        for token in token_ids:
            if token >= 1000:
                self.half = not self.half
                text += "" if self.half else "é"
            elif token:
                text += chr(token)
        return text

    def finish(self) -> str:
        return "\ufffd" if self.half else ""


def run(
    ids: list[int], reason: str, stops: list[str], rng: random.Random, **options: int
) -> tuple[str, int, list[int], str]:
    """Push `ids` in random groups."""
    assembler = Assembler(Characters(), stops, **options)
    text, count, offsets, at = "", 0, [], 0
    while True:
        size = rng.randint(1, 4)
        last = at + size >= len(ids)
        new, tokens, end = assembler.push(SequenceOutput("r", ids[at : at + size], reason if last else None))  # type: ignore[arg-type]
        text, count, offsets, at = text + new, count + tokens, offsets + assembler.offsets[:tokens], at + size
        if end is not None:
            return text, count, offsets, end


@pytest.mark.parametrize("stops", [[], ["x"]])
def test_the_last_token_is_text_where_it_completes_a_grammar_s(stops: list[str]) -> None:
    """And is none where it stands for the end."""
    for complete, text in ((True, "ab}"), (False, "ab")):
        outputs = [SequenceOutput("r", [97, 98]), SequenceOutput("r", [125], "stop", complete=complete)]
        for pieces in (outputs, [SequenceOutput.join(outputs)]):
            assembler = Assembler(Characters(), stops)
            given = [assembler.push(piece) for piece in pieces]
            assert "".join(new for new, _, _ in given) == text
            assert (sum(count for _, count, _ in given), given[-1][2]) == (3, "stop")
    assembler = Assembler(Characters(), stops)
    assembler.push(outputs[0])
    assert assembler.push(SequenceOutput("r", [], "stop", complete=True)) == ("", 0, "stop")


@pytest.mark.parametrize("seed", range(5))
def test_stop_strings_may_stay(seed: int) -> None:
    rng, ids = random.Random(seed), [ord(c) for c in "abcDEFghi"]
    for stops, without, kept, count in (
        (["EF"], "abcD", "abcDEF", 6),
        (["Fg", "DEF"], "abc", "abcDEF", 6),
        (["i"], "abcDEFgh", "abcDEFghi", 9),
        (["x"], "abcDEFghi", "abcDEFghi", 9),
    ):
        end = "length" if stops == ["x"] else "stop"
        text, tokens, _, reason = run(ids, "length", stops, rng)
        assert (text, tokens, reason) == (without, count, end)
        text, tokens, _, reason = run(ids, "length", stops, rng, include_stop=True)
        assert (text, tokens, reason) == (kept, count, end)


@pytest.mark.parametrize("seed", range(5))
def test_no_stop_string_counts_before_min_tokens(seed: int) -> None:
    """One that is begun before and completed after does, as an end token may be chosen after."""
    rng, ids = random.Random(seed), [ord(c) for c in "abababXab"]
    for least, stops, text, count, end in (
        (0, ["ab"], "", 2, "stop"),
        (1, ["ab"], "", 2, "stop"),
        (2, ["ab"], "ab", 4, "stop"),
        (3, ["ab"], "ab", 4, "stop"),
        (4, ["abab"], "ab", 6, "stop"),  # overlaps the one that did not count
        (5, ["ba", "X"], "ababab", 7, "stop"),
        (8, ["ab"], "abababX", 9, "stop"),
        (9, ["ab"], "abababXab", 9, "length"),
        (99, ["ab"], "abababXab", 9, "length"),
    ):
        assert run(ids, "length", stops, rng, min_tokens=least)[::3] == (text, end), least
        assert run(ids, "length", stops, rng, min_tokens=least)[1] == count, least


@pytest.mark.parametrize("seed", range(5))
def test_the_text_of_a_stop_token_may_stay(seed: int) -> None:
    rng = random.Random(seed)
    assert run([97, 98, 99], "stop", [], rng)[:2] == ("ab", 3)
    assert run([97, 98, 99], "stop", [], rng, include_stop=True)[:2] == ("abc", 3)
    assert run([97, 98, 0], "stop", [], rng, include_stop=True)[:2] == ("ab", 3)


@pytest.mark.parametrize("seed", range(5))
def test_offsets_are_where_a_tokens_text_begins(seed: int) -> None:
    ids = [97, 1000, 1000, 0, 98, 1000, 1000, 99]
    text, count, offsets, _ = run(ids, "length", [], random.Random(seed), offsets=True)
    assert (text, count, offsets) == ("aébéc", 8, [0, 1, 1, 2, 2, 3, 3, 4])
    text, count, offsets, _ = run(ids, "stop", ["zz"], random.Random(seed), offsets=True)
    assert (text, count, offsets) == ("aébé", 8, [0, 1, 1, 2, 2, 3, 3, 4])
