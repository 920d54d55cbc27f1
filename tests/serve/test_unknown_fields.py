"""Fields that nobody reads are named wherever they stand, for every endpoint's body."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_harness import Start

from atlas.config import ServeConfig
from atlas.serve import body
from atlas.serve.errors import ApiError
from atlas.serve.openai.requests import ChatRequest, CompletionRequest, parse
from atlas.serve.reference.unknown_fields import MAX_REPORTED, Unread, general_path, unknown_fields
from atlas.serve.routes import ENDPOINTS
from atlas.serve.service import Service


class Inner(msgspec.Struct):
    x: int = 0


class Red(msgspec.Struct, tag_field="type", tag="red"):
    inner: Inner | None = None


class Blue(msgspec.Struct, tag_field="type", tag="blue", rename={"name": "Name"}):
    name: str = ""


class Tree(msgspec.Struct):
    children: list[Tree] = []
    colours: list[Red | Blue] | str | None = None
    table: dict[str, Inner] = {}
    bounded: Annotated[list[Annotated[Inner, msgspec.Meta(title="t")]] | None, msgspec.Meta(description="d")] = None
    free: Any = None
    plain: dict[str, Any] = {}
    words: list[str] | Literal["none"] = "none"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, []),
        ({"a": None, "children": [{"b": None}]}, []),
        ({"a": 0, "b": "", "c": False}, ["a", "b", "c"]),
        ({"children": [{}, {"y": 1}, {"children": [{"z": 0}]}]}, ["children[1].y", "children[2].children[0].z"]),
        ({"children": [{"y": 1}, {"y": 1}]}, ["children[0].y"]),
        ({"colours": [{"type": "red", "inner": {"x": 1, "X": 1}}]}, ["colours[0].inner.X"]),
        ({"colours": [{"type": "blue", "name": "n", "Name": "n"}]}, ["colours[0].name"]),
        ({"colours": "red", "words": ["a"]}, []),
        ({"table": {"a": {"x": 1}, "b": {"q": 1}}}, ["table.b.q"]),
        ({"bounded": [{"w": 1}]}, ["bounded[0].w"]),
        ({"free": {"anything": [{"a": 1}]}, "plain": {"b": {"c": 1}}}, []),
        ({"old": "", "older": []}, ["older"]),
    ],
)
def test_paths(value: dict[str, Any], expected: list[str]) -> None:
    msgspec.convert(value, Tree)
    assert unknown_fields(value, Tree, ["old", "children[].old"]) == expected


def test_the_list_is_bounded() -> None:
    assert len(unknown_fields({f"f{i}": i for i in range(1000)}, Tree)) == MAX_REPORTED


@given(st.data())
def test_what_a_strict_struct_refuses_is_what_is_reported(data: st.DataObject) -> None:
    """msgspec itself finds the first unknown field of a struct that forbids them."""
    strict = msgspec.defstruct("S", [("a", int, 0), ("b", int | None, None)], forbid_unknown_fields=True)
    loose = msgspec.defstruct("L", [("a", int, 0), ("b", int | None, None)])
    value = data.draw(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 3)))
    try:
        msgspec.convert(value, strict)
        refused = False
    except msgspec.ValidationError:
        refused = True
    assert bool(unknown_fields(value, loose)) == refused


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.body is not None], ids=lambda e: e.path)
def test_no_body_accepts_what_it_does_not_know(endpoint: Any) -> None:
    """A struct that forbids unknown fields would refuse them without --strict-fields."""
    required = [f for f in msgspec.structs.fields(endpoint.body) if f.required]
    value = {field.encode_name: _example(field.type) for field in required}
    converted, ignored = body.parse(msgspec.json.encode({**value, "xyzzy": 1}), endpoint.body)
    assert isinstance(converted, endpoint.body) and ignored == ["xyzzy"]


def _example(kind: Any) -> Any:
    for value in ("a", 1, [], {}, [{"role": "user", "content": "a"}]):
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            continue
        return value
    raise AssertionError(kind)


def test_strict_fields(start: Start) -> None:
    server = start("--strict-fields").wait_ready()
    good = {"messages": [{"role": "user", "content": "a", "refusal": None}], "stream_options": {"include_usage": True}}
    assert server.http.post("/v1/chat/completions", json=good).status_code == 200
    for extra, path in (
        ({"tempurature": 1}, "tempurature"),
        ({"messages": [*good["messages"], {"role": "user", "content": "a", "mood": 1}]}, "messages[1].mood"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
    ):
        response = server.http.post("/v1/chat/completions", json={**good, **extra})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "unknown_parameter", path)
        assert path in error["message"] and "--strict-fields" in error["message"]
    response = server.http.post("/v1/completions", json={"prompt": "a", "é\r\n": 1})
    assert response.json()["error"]["param"] == "\\xe9\r\n"


@pytest.mark.parametrize(
    ("extra", "meant"),
    [
        ({"tempurature": 1}, "temperature"),
        ({"maxTokens": 1}, "max_tokens"),
        ({"Temperature": 1}, "temperature"),
        ({"stream_options": {"includeUsage": True}}, "include_usage"),
        ({"messages": [{"role": "user", "content": "a", "contents": 1}]}, "content"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strictt": True}}}, "strict"),
        ({"xyzzy": 1}, None),
        ({"t\u00e9mperature" * 100_000: 1}, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_slip_of_the_pen_is_known(extra: dict[str, Any], meant: str | None) -> None:
    value = {"messages": [{"role": "user", "content": "a"}], **extra}
    (field,) = parse(msgspec.json.encode(value), ChatRequest)[1]
    assert isinstance(field, Unread) and field.meant() == meant


def test_an_error_or_the_log_says_what_may_be_meant(caplog: pytest.LogCaptureFixture) -> None:
    value = {"messages": [{"role": "user", "content": "a", "tool_cals": []}] * 2, "tempurature": 1}
    unread = parse(msgspec.json.encode(value), ChatRequest)[1]
    strict = Service(ServeConfig(model="m", strict_fields=True))
    with pytest.raises(ApiError) as caught:
        strict.report_ignored(unread[1:])
    assert caught.value.body.message == (
        "tempurature: no field of this request; did you mean temperature? "
        "Otherwise leave it out (this server was started with --strict-fields)"
    )
    service = Service(ServeConfig(model="m"))
    for _ in range(2):
        headers = service.report_ignored([*unread, "free"])
        assert headers == {"x-atlas-ignored-fields": "messages[].tool_cals, tempurature, free"}
    assert [record.getMessage() for record in caplog.records] == [
        "request field 'messages[].tool_cals' was ignored: no field of this request; did you mean tool_calls?",
        "request field 'tempurature' was ignored: no field of this request; did you mean temperature?",
        "request field 'free' was ignored: no field of this request",
    ]


def test_general_path() -> None:
    assert general_path("a[12].b[0].c") == "a[].b[].c"


def test_a_request_is_not_slowed_down() -> None:
    """What is to be known of structs is found out once: a small body takes microseconds, with a thousandfold margin."""
    body_of = {"messages": [{"role": "user", "content": "a"}]}
    chat = next(endpoint.body for endpoint in ENDPOINTS if endpoint.path == "/v1/chat/completions")
    unknown_fields(body_of, chat)
    began = time.perf_counter()
    for _ in range(100):
        unknown_fields(body_of, chat)
    assert (time.perf_counter() - began) / 100 < 2e-3


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "text", "schema": {}}, ["response_format.schema"]),
        ({"type": "json_object", "schema": {"x": 1}, "strict": True}, ["response_format.strict"]),
        (
            {"type": "json_schema", "schema": {}, "json_schema": {"schema": {"x": 1}, "strictt": True}},
            ["response_format.schema", "response_format.json_schema.strictt"],
        ),
        ({"type": "json_schema", "json_schema": {"name": "a", "description": "b", "schema": {}, "strict": True}}, []),
        ({"type": "grammar", "grammar": "x"}, []),
        ({"type": "json_schema", "schema": None, "json_schema": {"schema": {}, "extra": None}}, []),
        # What is no format gets an error later, which says more.
        ({"type": "strange", "x": 1}, []),
        ({"type": ["text"], "x": 1}, []),
        ({"type": "json_schema", "json_schema": "x"}, []),
        ("text", []),
        (None, []),
    ],
)
def test_a_response_format_is_looked_into(kind: Any, given: Any, expected: list[str]) -> None:
    """`"strict": true` in the wrong place would be lost without a word."""
    text = msgspec.json.encode({"messages": [], "prompt": "a", "response_format": given})
    other = "prompt" if kind is ChatRequest else "messages"
    assert [name for name in parse(text, kind)[1] if name != other] == expected
