"""/v1/responses through the official client: answers, streams, conversations that go on, what is kept for whom."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItemList
from serve_harness import ANSWER, SPECIAL, RunningServer, Start, behaviour, eventually, make_checkpoint

MODEL = "tiny"
TRANSPARENT = "{{ messages | tojson }}{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking %}?{% endif %}"
"""Shows all that a template is given."""

TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BEHAVIOURS = {
    "1": behaviour("plain"),
    "2": behaviour("for ever ", end=None),
    "3": behaviour("slow ", end=None, delay=0.05),
    "4": behaviour("broken", delay=0.05, error_after=4),
    "7": behaviour(f"<think>\nto add\n</think>\n\nLet me see. {CALL}"),
    "8": behaviour(f"<think>\nto add\n</think>\n\nLet me see. {CALL}", group=7),
    "9": behaviour("<think>\nnot done"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model that reasons and calls tools, whose template shows what it is given."""
    folder = tmp_path_factory.mktemp("responses")
    model = make_checkpoint(folder / "tiny", chat_template=TRANSPARENT)
    script = {"default": behaviour(ANSWER), "behaviours": BEHAVIOURS, "max_context": 4096}
    flags = ("--served-model-name", MODEL, "--tool-parser", "hermes", "--reasoning-parser", "think")
    running = RunningServer(folder, script, model, *flags)
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.openai()


def ask(client: openai.OpenAI, given: Any = "Hello", seed: int | None = None, **options: Any) -> Any:
    body = {**options.pop("extra_body", {}), **({} if seed is None else {"seed": seed})}
    return client.responses.create(model=MODEL, input=given, extra_body=body, **options)


def messages_of(server: RunningServer) -> list[dict[str, Any]]:
    """The conversation that the template was last given."""
    prompt = server.events("submit")[-1]["prompt"]
    text = bytes(token - len(SPECIAL) for token in prompt if token >= len(SPECIAL)).decode()
    found: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text)[0]
    return found


def neutral(response: Any) -> dict[str, Any]:
    """Without ids of its own and times."""
    text = re.sub(r'"(resp|msg|rs|fc|call)_[0-9a-f]+"', r'"\1"', json.dumps(response.to_dict(mode="json")))
    data: dict[str, Any] = json.loads(text)
    return {key: value for key, value in data.items() if key not in ("created_at", "completed_at")}


# ---- answers ---------------------------------------------------------------------------------


def test_an_answer_has_the_shape_of_the_official_types(server: RunningServer, client: openai.OpenAI) -> None:
    given: dict[str, Any] = {
        "metadata": {"k": "v"},
        "instructions": "be brief",
        "temperature": 0.5,
        "top_p": 0.9,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "truncation": "auto",
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        "store": True,
    }
    answer = ask(client, **given)
    assert answer.output_text == ANSWER and answer.status == "completed"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        len(server.events("submit")[-1]["prompt"]),
        len(ANSWER.encode()) + 1,
    )
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert {name: answer.to_dict()[name] for name in given} == given
    raw = server.http.get(f"/v1/responses/{answer.id}").json()
    # As strict as the client can be; and what is read again is what was given.
    assert Response.model_validate(raw).to_dict() == answer.to_dict() == client.responses.retrieve(answer.id).to_dict()
    listed = server.http.get(f"/v1/responses/{answer.id}/input_items").json()
    ResponseItemList.model_validate(listed)


@pytest.mark.parametrize("seed", [1, 7, 8, 9])
@pytest.mark.parametrize("options", [{}, {"max_output_tokens": 30}, {"reasoning": {"summary": "auto"}}])
def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, seed: int, options: dict[str, Any]) -> None:
    options = {**options, "tools": [TOOL], "include": ["reasoning.encrypted_content"]}
    whole = ask(client, seed=seed, **options)
    events = list(ask(client, seed=seed, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert neutral(events[-1].response) == neutral(whole)
    assert events[-1].type == f"response.{whole.status}"
    # It was stored before its end was told.
    assert client.responses.retrieve(events[-1].response.id).to_dict() == events[-1].response.to_dict()
    if whole.status == "completed":
        with client.responses.stream(model=MODEL, input="Hello", extra_body={"seed": seed}, **options) as stream:
            final = stream.get_final_response()
        assert final.output_text == whole.output_text
        assert [item.type for item in final.output] == [item.type for item in whole.output]


def test_reasoning_text_and_calls_are_items_of_their_own(client: openai.OpenAI) -> None:
    answer = ask(client, seed=7, tools=[TOOL])
    reasoning, message, call = answer.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "to add", [])
    assert (message.type, answer.output_text) == ("message", "Let me see.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1, "b": 2})
    assert answer.status == call.status == "completed" and call.call_id and call.id != call.call_id
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.tools[0].name == "add" and answer.tools[0].parameters == TOOL["parameters"]


def test_reasoning_comes_as_the_summary_where_one_is_asked_for(client: openai.OpenAI) -> None:
    events = list(ask(client, seed=7, stream=True, reasoning={"summary": "detailed"}))
    (reasoning, *_) = events[-1].response.output
    assert [part.text for part in reasoning.summary] == ["to add"] and reasoning.content is None
    deltas = [event.delta for event in events if event.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "to add"
    assert not any(event.type == "response.reasoning_text.delta" for event in events)


def test_a_cut_answer_is_incomplete_and_says_why(client: openai.OpenAI) -> None:
    for seed, options in ((2, {}), (9, {"max_output_tokens": 12}), (7, {"max_output_tokens": 60, "tools": [TOOL]})):
        answer = ask(client, seed=seed, **{"max_output_tokens": 20, **options})
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[-1].status == "incomplete"
        assert answer.usage.output_tokens == answer.max_output_tokens


@pytest.mark.parametrize("asked", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_logprobs_are_those_of_a_chat_answer(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        logprobs=True,
        top_logprobs=asked.get("top_logprobs"),
    )
    assert chat.choices[0].logprobs is not None
    expected = [one.to_dict() for one in chat.choices[0].logprobs.content or ()]
    answer = ask(client, **asked)
    (part,) = answer.output[0].content
    assert [one.to_dict() for one in part.logprobs] == expected and expected
    events = list(ask(client, stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == [one["token"] for one in expected]
    Response.model_validate(events[-1].response.to_dict())
    assert client.responses.retrieve(answer.id, include=["message.output_text.logprobs"]).id == answer.id
    assert ask(client).output[0].content[0].logprobs == []


@pytest.mark.parametrize("seed", [7, 8])
def test_logprobs_of_reasoning_and_calls_are_not_those_of_text(client: openai.OpenAI, seed: int) -> None:
    answer = ask(client, seed=seed, tools=[TOOL], include=["message.output_text.logprobs"])
    (message,) = [item for item in answer.output if item.type == "message"]
    assert "".join(one.token for one in message.content[0].logprobs).strip() == "Let me see."


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("given", "response_format"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        ),
    ],
)
def test_a_text_format_asks_for_what_a_response_format_does(
    server: RunningServer, client: openai.OpenAI, given: Any, response_format: Any
) -> None:
    answer = ask(client, text={"format": given})
    assert answer.text.to_dict()["format"] == {"description": None, **given} if "schema" in given else given
    wanted = server.events("submit")[-1]["sampling"]["grammar"]
    messages: Any = [{"role": "user", "content": "Hello"}]
    client.chat.completions.create(model=MODEL, messages=messages, response_format=response_format)
    assert server.events("submit")[-1]["sampling"]["grammar"] == wanted
    assert (wanted is None) == (given["type"] == "text")


@pytest.mark.parametrize(
    ("choice", "same"),
    [
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_a_forced_call_is_that_of_a_chat_request(
    server: RunningServer, client: openai.OpenAI, choice: Any, same: Any
) -> None:
    answer = ask(client, tools=[TOOL], tool_choice=choice)
    assert answer.to_dict()["tool_choice"] == choice
    wanted = server.events("submit")[-1]["sampling"]["grammar"]
    function = {name: value for name, value in TOOL.items() if name != "type"}
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        tool_choice=same,
    )
    assert server.events("submit")[-1]["sampling"]["grammar"] == wanted is not None


def test_obfuscation_makes_deltas_of_one_size(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_obfuscation": True}}
    deltas = [event for event in ask(client, seed=8, **options) if event.type.endswith(".delta")]
    assert deltas and all((len(one.delta.encode()) + len(one.obfuscation)) % 32 == 0 for one in deltas)
    assert all("obfuscation" not in event.to_dict() for event in ask(client, seed=8, stream=True))


def test_events_have_names_and_no_done_marker(server: RunningServer) -> None:
    text = server.http.post("/v1/responses", json={"input": "x", "stream": True}).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    for name, data in blocks:
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert blocks[0][0] == "event: response.created" and blocks[-1][0] == "event: response.completed"


# ---- conversations ---------------------------------------------------------------------------


def test_a_conversation_goes_on_from_what_is_stored(server: RunningServer, client: openai.OpenAI) -> None:
    first = ask(client, "one", instructions="be brief")
    second = ask(client, "two", previous_response_id=first.id, seed=1)
    assert messages_of(server) == [  # instructions are not carried over
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "two"},
    ]
    ask(client, "three", previous_response_id=second.id, instructions="be long")
    assert messages_of(server) == [
        {"role": "system", "content": "be long"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "plain"},
        {"role": "user", "content": "three"},
    ]
    # A conversation may branch, and does not need the responses between to be there.
    client.responses.delete(second.id)
    ask(client, "other", previous_response_id=first.id)
    assert [message["content"] for message in messages_of(server)] == ["one", ANSWER, "other"]


def test_a_call_is_answered_in_every_way_that_the_api_has(server: RunningServer, client: openai.OpenAI) -> None:
    first = ask(client, "add", seed=7, tools=[TOOL], include=["reasoning.encrypted_content"])
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    user = {"role": "user", "content": "add"}

    def prompt(given: list[Any], **options: Any) -> Any:
        ask(client, given, tools=[TOOL], **options)
        return messages_of(server)

    stored = prompt([output], previous_response_id=first.id)
    assert [message["role"] for message in stored] == ["user", "assistant", "tool"]
    assert stored[1]["reasoning_content"] == "to add" and stored[1]["content"] == "Let me see."
    assert stored[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert stored[2]["tool_call_id"] == call.call_id and stored[2]["content"] == "3"
    sent = [item.to_dict(mode="json") for item in first.output]
    assert prompt([user, *sent, output], store=False) == stored
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    assert prompt([user, *references, output]) == stored
    assert prompt([user, *({"id": item.id} for item in first.output), output]) == stored
    bare = [
        {**item, "content": [], "encrypted_content": None} if item["type"] == "reasoning" else item for item in sent
    ]
    assert prompt([user, *bare, output]) == stored  # what LangChain makes of a stream
    sealed = [{**item, "content": None} if item["type"] == "reasoning" else item for item in sent]
    assert prompt([user, *sealed, output], store=False) == stored


def test_the_tokens_of_an_input_can_be_counted(server: RunningServer, client: openai.OpenAI) -> None:
    before = len(server.events("submit"))
    first = client.responses.input_tokens.count(model=MODEL, input="one", instructions="be brief", tools=[TOOL])
    assert (first.object, len(server.events("submit"))) == ("response.input_tokens", before)  # nothing is generated
    answer = ask(client, "one", instructions="be brief", tools=[TOOL])
    assert answer.usage.input_tokens == first.input_tokens
    more = client.responses.input_tokens.count(model=MODEL, input="two", previous_response_id=answer.id)
    assert more.input_tokens == ask(client, "two", previous_response_id=answer.id).usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(model=MODEL, input="x" * 9000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_what_is_not_there_cannot_be_continued(client: openai.OpenAI) -> None:
    unknown = ask(client, store=False)
    assert unknown.store is False
    for response_id in ("resp_x", unknown.id):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, previous_response_id=response_id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as missing:
                call(response_id)
            assert (missing.value.code, missing.value.param) == ("response_not_found", "response_id")
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(response_id)
    with pytest.raises(openai.NotFoundError) as item:
        ask(client, [{"type": "item_reference", "id": unknown.output[0].id}])
    assert (item.value.code, item.value.param) == ("item_not_found", "input[0].id")


def test_a_deleted_response_is_gone(server: RunningServer, client: openai.OpenAI) -> None:
    answer = ask(client)
    assert server.http.delete(f"/v1/responses/{answer.id}").json() == {
        "id": answer.id,
        "object": "response",
        "deleted": True,
    }
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    first = ask(client, [{"role": "user", "content": str(number)} for number in range(5)])
    second = ask(client, "last", previous_response_id=first.id)

    def texts(**options: Any) -> list[str]:
        pages = client.responses.input_items.list(second.id, **options)
        return [item.content[0].text for item in pages]  # type: ignore[union-attr,misc]

    expected = ["0", "1", "2", "3", "4", ANSWER, "last"]
    for limit in (1, 2, 3, 7, 100):
        assert texts(limit=limit, order="asc") == expected
        assert texts(limit=limit) == expected[::-1]
    page = client.responses.input_items.list(second.id, limit=2, order="asc")
    assert (page.has_more, len(page.data)) == (True, 2)
    after = client.responses.input_items.list(second.id, limit=100, order="asc", after=page.data[-1].id)
    assert len(after.data) == 5 and not after.has_more
    assert len(client.responses.input_items.list(first.id).data) == 5
    for options in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_x"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_items.list(second.id, **options)  # type: ignore[arg-type]
        assert caught.value.param == next(iter(options))


def test_a_query_is_checked_and_read_whole(server: RunningServer, client: openai.OpenAI) -> None:
    path = f"/v1/responses/{ask(client).id}"
    for query, param in (
        ("stream=yes", "stream"),
        ("stream=true", "stream"),
        ("starting_after=1", "starting_after"),
        ("include=all", "include"),
        ("include[]=message.output_text.logprobs", "include"),
        ("stream=true&stream=true", "stream"),
    ):
        answer = server.http.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = server.http.get(f"{path}?include[]=web_search_call.results&page=3")
    assert (answer.status_code, answer.headers["x-atlas-ignored-fields"]) == (200, "page")


# ---- what goes wrong -------------------------------------------------------------------------


def test_a_stream_that_breaks_in_the_middle_is_a_failed_response(client: openai.OpenAI) -> None:
    events = list(ask(client, seed=4, stream=True))
    assert [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error" and "not finite" in last.response.error.message
    stored = client.responses.retrieve(last.response.id)
    assert stored.status == "failed" and stored.output_text == last.response.output_text != ""
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, seed=4)
    assert caught.value.code == "generation_failed"


def test_who_goes_away_ends_the_work_and_leaves_nothing(server: RunningServer, client: openai.OpenAI) -> None:
    before = len(server.events("abort"))
    with ask(client, seed=3, stream=True) as stream:
        events = iter(stream)
        opening = next(events).response
        assert any(event.type == "response.output_text.delta" for event in events)
    eventually(lambda: len(server.events("abort")) == before + 1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(opening.id)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/responses", json={"input": "x", "seed": 3}, timeout=0.3)
    eventually(lambda: len(server.events("abort")) == before + 2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 999}, "temperature"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "sub"}]}},
            "tool_choice.tools[0].name",
        ),
        ({"input": [{"role": "user", "content": "x" * 9000}]}, "input"),
        ({"model": "other"}, "model"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"properties": {"a": {"type": "no"}}}}}},
            "text.format.schema.properties.a.type",
        ),
        (
            {"tools": [{**TOOL, "parameters": {"properties": {"a": {"type": "no"}}}}], "tool_choice": "required"},
            "tools[0].parameters.properties.a.type",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_errors_name_the_fields_of_this_api(server: RunningServer, body: dict[str, Any], param: str) -> None:
    answer = server.http.post("/v1/responses", json={"input": "x", **body})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param and error["code"]
    assert error["message"].startswith(param)


def test_a_model_without_a_template_says_so(start: Start, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "bare", chat_template=None)
    answer = start(model=model).wait_ready().http.post("/v1/responses", json={"input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")
    assert answer.json()["error"]["param"] == "input"


def test_a_stream_that_takes_too_long_ends_with_the_error_of_this_api(start: Start) -> None:
    server = start("--request-timeout", "0.4").wait_ready()
    text = server.http.post("/v1/responses", json={"input": "x", "seed": 3, "stream": True}).text
    name, data = text.strip().split("\n\n")[-1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["code"], error["param"]) == ("event: error", "error", "request_timed_out", None)
    with pytest.raises(openai.APIError, match=r"0\.4 s"):
        list(server.openai().responses.create(input="x", stream=True, extra_body={"seed": 3}))


# ---- bounds and keys -------------------------------------------------------------------------


def test_the_server_keeps_as_much_as_it_is_told(start: Start) -> None:
    client = start("--max-responses", "3", "--response-memory", "30kB").wait_ready().openai()

    def kept(ids: list[str]) -> list[str]:
        found = []
        for response_id in ids:
            try:
                found.append(client.responses.retrieve(response_id).id)
            except openai.NotFoundError:
                assert not found, "the oldest goes first"
        return found

    ids = [client.responses.create(input=str(number)).id for number in range(5)]
    assert kept(ids) == ids[2:]
    ids += [client.responses.create(input="x" * 300, metadata={f"{n}": "v" * 512 for n in range(16)}).id for _ in "abc"]
    assert kept(ids) == ids[-2:]


def test_one_key_sees_nothing_of_anothers(start: Start) -> None:
    keys = ("key-of-ann-0123456789", "key-of-bob-0123456789")
    server = start("--api-key", keys[0], "--api-key", keys[1]).wait_ready()
    ann, bob = (openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) for key in keys)
    answer = ann.responses.create(input="mine")
    running = ann.responses.create(input="mine", background=True, extra_body={"seed": 3})
    for response_id in (answer.id, running.id):
        for call in (
            bob.responses.retrieve,
            bob.responses.delete,
            bob.responses.cancel,
            bob.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                call(response_id)
        with pytest.raises(openai.BadRequestError) as caught:
            bob.responses.create(input="x", previous_response_id=response_id)
        assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        bob.responses.create(input=[{"type": "item_reference", "id": answer.output[0].id}])  # type: ignore[list-item]
    assert ann.responses.retrieve(answer.id).id == answer.id
    assert ann.responses.cancel(running.id).status == "cancelled"
