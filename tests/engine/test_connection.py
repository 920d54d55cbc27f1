"""Frames of the engine's socket, however they are cut."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from atlas.engine import messages
from atlas.engine.connection import EngineConnection
from atlas.engine.messages import FromEngine, Loading, SequenceOutput, Stats, StepOutput

SENT: list[FromEngine] = [
    Loading("weights"),
    StepOutput([SequenceOutput(f"r{i}", [i]) for i in range(40)]),
    StepOutput([]),
    Stats(1, 2, 3, 4, 5),
    Loading("x" * 70_000),
    Loading(""),
]
FRAMES = [messages.encode(message) for message in SENT]


def receive(data: bytes, cuts: list[int]) -> tuple[list[FromEngine], list[str | None]]:
    """What is handed over of `data` cut at `cuts`, and how it ended."""
    got: list[FromEngine] = []
    ends: list[str | None] = []
    connection = EngineConnection(lambda _: None, got.append, ends.append)
    places = [0, *sorted(cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        if begin < end:
            connection.data_received(data[begin:end])
    return got, ends


@given(st.lists(st.integers(0, len(b"".join(FRAMES))), max_size=30))
@example(list(range(200)))
def test_any_cuts_give_the_same_messages(cuts: list[int]) -> None:
    assert receive(b"".join(FRAMES), cuts) == (SENT, [])


def test_a_message_is_handed_over_once_it_is_whole() -> None:
    for index, frame in enumerate(FRAMES):
        before = b"".join(FRAMES[:index])
        assert receive(before + frame[:-1], [len(before) + 2])[0] == SENT[:index]
        assert receive(before + frame, [])[0] == SENT[: index + 1]


def test_what_is_no_message_ends_it_once() -> None:
    whole = FRAMES[0]
    for bad, words in (
        (messages.LENGTH.pack(3) + b"\xc1\xc1\xc1", "malformed"),
        (messages.LENGTH.pack(messages.MAX_MESSAGE_BYTES + 1), f"{messages.MAX_MESSAGE_BYTES + 1} bytes"),
    ):
        for cuts in ([], [len(whole)], [len(whole) + 2]):
            got, ends = receive(whole + bad + whole, cuts)
            assert got == SENT[:1]
            assert len(ends) == 1 and ends[0] is not None and "broken protocol" in ends[0] and words in ends[0]
