"""The events of a response, against the official client: its types, its accumulator, and every way to cut an answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import openai.types.responses as sdk
import pytest
from openai import omit
from openai.lib._parsing._responses import parse_response
from openai.lib.streaming.responses._responses import ResponseStreamState
from pydantic import TypeAdapter

from atlas import parsers
from atlas.parsers import Call, CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from atlas.serve.openai.response_events import StreamEvent, encode
from atlas.serve.openai.responses_items import seal, unseal
from atlas.serve.openai.responses_objects import (
    ResponseError,
    ResponseInputTokens,
    ResponseObject,
    ResponseOutputTokens,
    ResponseUsage,
)
from atlas.serve.openai.responses_request import parse
from atlas.serve.openai.responses_writer import ResponseWriter

USAGE = ResponseUsage(3, ResponseInputTokens(2), 5, ResponseOutputTokens(1), 8)
EVENTS: TypeAdapter[Any] = TypeAdapter(sdk.ResponseStreamEvent)
CALL = [CallBegin(0, "call_1", "f"), CallArguments(0, '{"a": '), CallArguments(0, "1}"), CallEnd(0)]
BROKEN = [CallBegin(1, "call_2", "g"), CallArguments(1, '{"a": 1'), CallEnd(1, complete=False, rest="<")]
ANSWERS: dict[str, Sequence[Event]] = {
    "text": [Content("Hi 😀"), Content(" there")],
    "reasoned": [Reasoning("so"), Reasoning(" then"), Content("42")],
    "call": [Content("wait"), *CALL],
    "all": [Reasoning("r"), Content("a"), *CALL, *BROKEN, Content("b"), Reasoning("s"), Content("c")],
    "nothing": [],
    "only reasoning": [Reasoning("hm")],
}


def opening(**changes: Any) -> ResponseObject:
    fields: dict[str, Any] = {
        "id": "resp_1",
        "created_at": 1700000000,
        "status": "in_progress",
        "model": "m",
        "background": False,
        "store": True,
        "previous_response_id": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }
    return ResponseObject(**{**fields, **changes})


def whole(writer: ResponseWriter, deltas: Sequence[Sequence[Event]], *, cut: bool = False) -> list[StreamEvent]:
    found = writer.begin() + writer.start()
    for delta in deltas:
        found += writer.add(delta)
    return found + list(writer.complete(USAGE, cut=cut))


def decoded(events: Sequence[StreamEvent]) -> list[Any]:
    """What a client makes of the events, each checked by the official types."""
    result = []
    for number, event in enumerate(events):
        head, data = encode(event).decode().removesuffix("\n\n").split("\ndata: ")
        value = json.loads(data)
        assert head == f"event: {value['type']}" and value["sequence_number"] == number
        result.append(EVENTS.validate_json(data, strict=True))
        assert result[-1].type == value["type"]
    return result


def neutral(response: Any) -> Any:
    """Without what differs each time: ids, and when it was completed."""
    data = json.loads(re.sub(r'"(msg|rs|fc)_[0-9a-f]{48}"', r'"\1"', msgspec.json.encode(response).decode()))
    if isinstance(data, dict):
        data.pop("completed_at")
    return data


@pytest.mark.parametrize("summary", [False, True])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_the_official_client_accumulates_the_response(name: str, cut: bool, summary: bool) -> None:
    writer = ResponseWriter(opening(), summary=summary, sealed=summary)
    received = decoded(whole(writer, [[event] for event in ANSWERS[name]], cut=cut))
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in received:
        state.handle_event(event)
    final = received[-1].response
    assert final.status == ("incomplete" if cut else "completed")
    assert (final.incomplete_details.reason if cut else final.incomplete_details) == (
        "max_output_tokens" if cut else None
    )
    # The deltas, the items that were said to be done, and the last object tell the same.
    accumulated = [item.to_dict() for index, item in sorted(state._completed_output.items())]
    assert accumulated == [item.to_dict() for item in final.output]
    if not cut:
        assert state._completed_response is not None
        assert state._completed_response.output_text == final.output_text
    assert sum_of_deltas(received) == texts_of(final)


def sum_of_deltas(received: Sequence[Any]) -> dict[str, str]:
    sums: dict[str, str] = {}
    for event in received:
        if event.type.endswith(".delta"):
            sums[event.item_id] = sums.get(event.item_id, "") + event.delta
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == sums.get(event.item_id, "")
    return {key: text for key, text in sums.items() if text}


def texts_of(response: Any) -> dict[str, str]:
    texts = {}
    for item in response.output:
        parts = [*(getattr(item, "summary", None) or ()), *(getattr(item, "content", None) or ())]
        texts[item.id] = item.arguments if item.type == "function_call" else "".join(part.text for part in parts)
    return {key: text for key, text in texts.items() if text}


def test_every_kind_of_item_is_worded() -> None:
    writer = ResponseWriter(opening())
    whole(writer, [ANSWERS["all"]])
    kinds = [type(item).__struct_config__.tag for item in writer.response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message", "reasoning", "message"]
    calls = [
        item for item in json.loads(msgspec.json.encode(writer.response.output)) if item["type"] == "function_call"
    ]
    assert [(call["name"], call["call_id"], call["arguments"], call["status"]) for call in calls] == [
        ("f", "call_1", '{"a": 1}', "completed"),
        ("g", "call_2", '{"a": 1', "incomplete"),
    ]


def test_an_answer_without_words_is_an_empty_message() -> None:
    for name, kinds in (("nothing", ["message"]), ("only reasoning", ["reasoning", "message"])):
        writer = ResponseWriter(opening())
        received = decoded(whole(writer, [ANSWERS[name]]))
        assert [item.type for item in received[-1].response.output] == kinds
        assert received[-1].response.output_text == ""


def test_what_was_being_written_when_it_was_cut_is_incomplete() -> None:
    writer = ResponseWriter(opening())
    received = decoded(whole(writer, [[Reasoning("r"), Content("half a")]], cut=True))
    assert [item.status for item in received[-1].response.output] == ["completed", "incomplete"]
    assert received[-2].item.status == "incomplete"


@pytest.mark.parametrize("seed", range(20))
def test_the_response_does_not_depend_on_how_the_answer_came(seed: int) -> None:
    rng = random.Random(seed)
    answer = list(ANSWERS["all"])
    pieces: list[Event] = []
    for event in answer:
        if isinstance(event, Content | Reasoning):
            pieces += [type(event)(letter) for letter in event.text]
        elif isinstance(event, CallArguments):
            pieces += [CallArguments(event.index, letter) for letter in event.text]
        else:
            pieces.append(event)
    deltas: list[list[Event]] = [[]]
    for piece in pieces:
        if rng.random() < 0.5:
            deltas.append([])
        deltas[-1].append(piece)
    writers = ResponseWriter(opening()), ResponseWriter(opening())
    whole(writers[0], deltas)
    whole(writers[1], [answer])
    assert neutral(writers[0].response) == neutral(writers[1].response)
    # An answer that a parser collected is in it, call by call.
    collected = parsers.collect(answer)
    output = neutral(writers[0].response)["output"]
    assert "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"]) == "abc"
    assert collected.calls[0] == Call("call_1", "f", '{"a": 1}', complete=True)


def test_logprobs_stand_beside_the_text_that_they_are_of() -> None:
    def entry(token: str) -> dict[str, Any]:
        return {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}

    writer = ResponseWriter(opening())
    found = writer.begin() + writer.start()
    found += writer.add([Reasoning("r")], [entry("<think>"), entry("r")])
    found += writer.add([], [entry("</think>")])
    found += writer.add([], [entry("a")])  # held back by the parser
    found += writer.add([Content("ab")], [entry("b")])
    found += writer.add([], [entry("<end>")])
    found += writer.complete(USAGE, cut=False)
    final = decoded(found)[-1].response
    assert [one.token for one in final.output[1].content[0].logprobs] == ["</think>", "a", "b", "<end>"]
    deltas = [event for event in decoded(found) if event.type == "response.output_text.delta"]
    assert [[one.token for one in event.logprobs] for event in deltas] == [["</think>", "a", "b"], ["<end>"]]


def test_a_response_that_breaks_says_so_and_keeps_what_there_is() -> None:
    def fail(writer: ResponseWriter) -> list[StreamEvent]:
        return list(writer.fail(ResponseError("server_error", "it broke")))

    def cancel(writer: ResponseWriter) -> list[StreamEvent]:
        return list(writer.cancel())

    endings: list[tuple[Callable[[ResponseWriter], list[StreamEvent]], str, str]] = [
        (fail, "response.failed", "failed"),
        (cancel, "response.incomplete", "cancelled"),
    ]
    for end, kind, status in endings:
        writer = ResponseWriter(opening(status="queued"))
        events = [*writer.begin(queued=True), *writer.start(), *writer.add([Content("so f")])]
        received = decoded(events + end(writer))
        assert [event.type for event in received[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        assert [event.response.status for event in received[:3]] == ["queued", "queued", "in_progress"]
        last = received[-1]
        assert (last.type, last.response.status, last.response.output_text) == (kind, status, "so f")
        assert last.response.output[0].status == "incomplete"
        assert (last.response.error.code if status == "failed" else last.response.error) == (
            "server_error" if status == "failed" else None
        )


def test_what_the_official_client_sends_back_of_an_answer_is_read_whole() -> None:
    writer = ResponseWriter(opening(), sealed=True)
    whole(writer, [ANSWERS["all"]])
    plain = sdk.Response.model_validate(json.loads(msgspec.json.encode(writer.response)))
    parsed = parse_response(text_format=omit, input_tools=omit, response=plain)
    for response in (plain, parsed):
        for dump in ("to_dict", "model_dump"):
            items = [getattr(item, dump)(mode="json") for item in response.output]
            request, ignored = parse(json.dumps({"input": items}).encode())
            assert ignored == [] and len(request.input) == len(items)
            assert neutral(request.input)[0]["content"] == neutral(writer.response)["output"][0]["content"]


@pytest.mark.parametrize("text", ["", "plain", "é😀\n", "x" * 5000])
def test_sealed_reasoning_can_be_read_again_here_only(text: str) -> None:
    assert unseal(seal(text)) == text
    assert unseal("gAAAAA" + seal(text)) is None and unseal("not base64 é") is None and unseal("") is None
