"""Content blocks and stream events of the Messages API, read by the official client's own types."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pydantic
import pydantic_core
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st

from atlas.parsers import (
    MARKERS,
    TOOL_FORMATS,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from atlas.serve.anthropic.answers import Message, MessageDelta, MessageStart, MessageStop, Stop, Usage, event
from atlas.serve.anthropic.events import BlockWriter, Calls, Signature, blocks, hidden_thinking

SDK_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)
USAGE = Usage(input_tokens=3, output_tokens=4)

THINK_CALL_TALK = [
    Reasoning("let me "),
    Reasoning("see"),
    Content("I look."),
    CallBegin(0, "call_a", "weather"),
    CallArguments(0, '{"city": '),
    CallArguments(0, '"Zürich 😀", "n": 1e400}'),
    CallEnd(0),
    CallBegin(1, "call_b", "now"),
    CallArguments(1, "{}"),
    CallEnd(1),
    Content("Done."),
]


def whole(events: Iterable[Event], *, hide: bool = False) -> dict[str, Any]:
    """The message in one piece, as the official client reads it."""
    message = Message(
        id="msg_1",
        model="tiny",
        content=blocks(events, hide_thinking=hide),
        stop_reason="end_turn",
        stop_sequence=None,
        usage=USAGE,
    )
    return SdkMessage.model_validate_json(msgspec.json.encode(message)).to_dict()


def sse(events: Iterable[Sequence[Event]], *, hide: bool = False) -> list[dict[str, Any]]:
    """The data of all events of a stream, each checked for its name."""
    writer = BlockWriter(hide_thinking=hide)
    start = Message(id="msg_1", model="tiny", content=[], stop_reason=None, stop_sequence=None, usage=USAGE)
    end = event(MessageDelta(Stop("end_turn", None), USAGE)) + event(MessageStop())
    data = event(MessageStart(start)) + b"".join(map(writer.feed, events)) + writer.finish() + end
    result = []
    for text in data.decode().removesuffix("\n\n").split("\n\n"):
        name, line = text.split("\n")
        value = json.loads(line.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        result.append(value)
    return result


def streamed(events: Iterable[Sequence[Event]], *, hide: bool = False) -> dict[str, Any]:
    """The message that the official client makes of a stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for value in sse(events, hide=hide):
        snapshot = accumulate_event(
            event=SDK_EVENT.validate_python(value), current_snapshot=snapshot, json_bufs=buffers
        )
    message: dict[str, Any] = snapshot.to_dict()
    return message


def test_blocks_of_a_stream_and_of_a_message() -> None:
    message = whole(THINK_CALL_TALK)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert message["content"][0]["thinking"] == "let me see"
    assert message["content"][2]["id"] == "call_a" and message["content"][2]["name"] == "weather"
    assert message["content"][2]["input"]["city"] == "Zürich 😀"
    assert streamed([[one] for one in THINK_CALL_TALK]) == message
    assert streamed([THINK_CALL_TALK]) == message


def test_the_grammar_of_a_stream() -> None:
    names = [value["type"] for value in sse([[one] for one in THINK_CALL_TALK])]
    inside = [name.removeprefix("content_block_") for name in names[1:-2]]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert inside == [
        *("start", "delta", "delta", "delta", "stop"),  # the last delta of thinking is its signature
        *("start", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("start", "delta", "stop"),
    ]


def test_numbers_keep_their_spelling() -> None:
    encoded = msgspec.json.encode(blocks(THINK_CALL_TALK))
    assert b'"input":{"city": "Z\xc3\xbcrich \xf0\x9f\x98\x80", "n": 1e400}' in encoded


def test_nothing_was_said() -> None:
    for events in ([], [Content("")], [Reasoning(""), Content("")]):
        assert whole(events)["content"] == streamed([events])["content"] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), ("{", {}), ('{"a": 1', {"a": 1}), ('{"a": {"b": [1, "}"]}', {"a": {"b": [1, "}"]}})],
)
def test_a_call_that_broke_off(arguments: str, expected: dict[str, Any]) -> None:
    events = [CallBegin(0, "c", "f"), CallArguments(0, arguments), CallEnd(0, complete=False, rest="xyz")]
    assert whole(events)["content"][0]["input"] == expected
    assert streamed([[one] for one in events]) == whole(events)


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x{y", "c": [1, {"d": null}]}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama3_json": '{"name": "f", "parameters": {"a": 1, "b": "x"}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1, "b": "x"}}]',
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}}}


def parse(name: str, pieces: Iterable[str]) -> list[list[Event]]:
    """The events of an answer that comes in these pieces."""
    ids = itertools.count()
    parser = AnswerParser(TOOL_FORMATS[name], {"f": SCHEMA}, MARKERS["think"], new_id=lambda: f"call_{next(ids)}")
    return [*(parser.feed(piece) for piece in pieces), parser.finish()]


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_cut_of_an_answer(name: str) -> None:
    """Cut by `max_tokens` anywhere, an answer reads the same in one piece, and character by character; what is left of
    a call is what the client's own reader of unfinished JSON finds."""
    text = CALLS[name] if name == "llama3_json" else f"<think>I think</think>Look: {CALLS[name]}"
    seen = set()
    for end in range(len(text) + 1):
        one = list(itertools.chain(*parse(name, [text[:end]])))
        message = whole(one)
        assert streamed(parse(name, text[:end])) == message
        arguments = "".join(event.text for event in one if isinstance(event, CallArguments))
        for block in message["content"]:
            if block["type"] == "tool_use":
                seen.add(json.dumps(block["input"]))
                partial = pydantic_core.from_json(arguments, allow_partial=True) if arguments else {}
                assert block["input"] == partial
    assert len(seen) >= 2


@given(st.data())
def test_any_split_of_any_text(data: st.DataObject) -> None:
    words = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "\n",
        "a ",
        "😀",
        CALLS["hermes"],
        '{"name": "f"',
        "}",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    hide = data.draw(st.booleans())
    message = whole(itertools.chain(*parse("hermes", [text])), hide=hide)
    assert streamed(parse("hermes", pieces), hide=hide) == message


def test_signatures() -> None:
    pieces, text = ["Grüezi ", "😀", " \ud83d"], "Grüezi 😀 \ud83d"
    for hidden in (False, True):
        one, other, strange = (Signature(hidden=hidden) for _ in range(3))
        one.add(text)
        for piece in pieces:
            other.add(piece)
        strange.add(text + ".")
        assert one.value() == other.value() != strange.value()
    shown, hidden_one = Signature(hidden=False), Signature(hidden=True)
    for signature in (shown, hidden_one):
        signature.add("Grüezi 😀")
    assert hidden_thinking(hidden_one.value()) == "Grüezi 😀"
    for other_value in (shown.value(), "", "EqQBCkYIARgC", hidden_one.value()[:-3], "atlas-thinking-/w=="):
        assert hidden_thinking(other_value) == ""


def test_thinking_that_is_not_shown() -> None:
    message = streamed([THINK_CALL_TALK], hide=True)
    assert message == whole(THINK_CALL_TALK, hide=True)
    block = message["content"][0]
    assert block["thinking"] == "" and hidden_thinking(block["signature"]) == "let me see"


BROKEN = [CallBegin(0, "c", "f"), CallEnd(0, complete=False)]


@pytest.mark.parametrize(
    ("events", "reason", "stop", "full", "expected"),
    [
        ([Content("a")], "stop", None, False, "end_turn"),
        ([Content("a")], "stop", "x", False, "stop_sequence"),
        (THINK_CALL_TALK, "tool_calls", None, False, "tool_use"),
        (THINK_CALL_TALK, "stop", None, False, "tool_use"),
        (THINK_CALL_TALK, "length", None, False, "max_tokens"),
        (THINK_CALL_TALK, "length", None, True, "model_context_window_exceeded"),
        (BROKEN, "stop", None, False, "end_turn"),
        ([*THINK_CALL_TALK, CallBegin(2, "c", "f"), CallEnd(2, complete=False)], "tool_calls", None, False, "end_turn"),
        (BROKEN, "length", None, False, "max_tokens"),
    ],
)
def test_stop_reasons(events: list[Event], reason: str, stop: str | None, full: bool, expected: str) -> None:
    calls = Calls()
    for one in events:
        calls.feed([one])
    assert calls.stop_reason(reason, stop, context_is_full=full) == expected
