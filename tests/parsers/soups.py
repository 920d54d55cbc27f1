"""Random texts that look like answers, for whoever looks for texts that a parser takes wrongly."""

from __future__ import annotations

from hypothesis import strategies as st

from atlas.parsers import MARKERS, TOOL_FORMATS
from tests.parsers.cases import CASES

WORDS = {word for form in TOOL_FORMATS.values() for word in (*form.opens, *form.bare, *form.ends, *form.inner)}
WORDS |= {word for markers in MARKERS.values() for word in (markers.start, markers.end)}
WORDS |= {*'{}[],:"\\;<>f1ä😀', "[ARGS]", "[CALL_ID]", "```json", "```", "call:", '<|"|>', "<escape>", "now", "true"}
WORDS |= {" ", "\n", "\n\n", " " * 300, '"name": "f"', '"arguments": {', '"parameters": {', '"ä": 1', '"x": "'}
WORDS |= {"<function=f>", "<parameter=ä>", "</parameter>", "</function>", '<invoke name="f">', "</invoke>"}
WORDS |= {'<parameter name="ä">', "<arg_key>ä</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁sep｜>", "a" * 300}
WORDS |= {'"list": [1, {"a": null}]', '"a": NaN', "1e999", "-0", "\\u00e4", "\\ud800", "None", "null", "\x00", "\u2028"}


@st.composite
def soups(draw: st.DrawFn) -> str:
    """Text of the formats' own words, of pieces of real outputs, and of anything else."""
    piece = st.one_of(
        st.sampled_from(sorted(WORDS)),
        st.sampled_from([case.text for case in CASES]).flatmap(
            lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
                lambda ends: text[min(ends) : max(ends)]
            )
        ),
        st.text(max_size=4),
    )
    return "".join(draw(st.lists(piece, max_size=14)))
