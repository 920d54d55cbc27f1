"""Chunks put together from parts are the chunks that the encoder makes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from atlas.serve.openai.frames import Frames


def once(event: Event) -> bytes:
    """Of an event that stands in its chunk once."""
    return b"data: " + msgspec.json.encode({"id": '"text":"', "event": event, "x": [1, "é\n"]}) + b"\n\n"


EVENTS = st.one_of(
    st.builds(Content, st.text()),
    st.builds(Reasoning, st.text()),
    st.builds(CallBegin, st.integers(0, 3), st.text(), st.text()),
    st.builds(CallArguments, st.integers(0, 3), st.text()),
    st.builds(CallEnd, st.integers(0, 3), st.booleans(), st.text()),
)


@given(st.lists(EVENTS))
def test_frames_are_what_the_encoder_makes(events: list[Event]) -> None:
    frames = Frames(once)
    assert [frames.of(event) for event in events] == [once(event) for event in events]


def test_an_event_that_stands_in_its_chunk_twice_is_not_cut_wrongly() -> None:
    def twice(event: Event) -> bytes:
        return once(event) * 2

    with pytest.raises(ValueError, match="too many values"):
        Frames(twice).of(Content("x"))
