"""What /v1/responses keeps: conversations that go on, items and pages of them, for whom and how much."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from responses_server import MODEL, TOOL, ask, messages_of
from serve_harness import ANSWER, RunningServer, Start


@pytest.fixture
def client(reasoner: RunningServer) -> openai.OpenAI:
    return reasoner.openai()


def test_a_conversation_goes_on_from_what_is_stored(reasoner: RunningServer, client: openai.OpenAI) -> None:
    first = ask(client, "one", instructions="be brief")
    second = ask(client, "two", previous_response_id=first.id, seed=1)
    assert messages_of(reasoner) == [  # instructions are not carried over
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "two"},
    ]
    ask(client, "three", previous_response_id=second.id, instructions="be long")
    assert messages_of(reasoner) == [
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
    assert [message["content"] for message in messages_of(reasoner)] == ["one", ANSWER, "other"]


def test_a_call_is_answered_in_every_way_that_the_api_has(reasoner: RunningServer, client: openai.OpenAI) -> None:
    first = ask(client, "add", seed=7, tools=[TOOL], include=["reasoning.encrypted_content"])
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    user = {"role": "user", "content": "add"}

    def prompt(given: list[Any], **options: Any) -> Any:
        ask(client, given, tools=[TOOL], **options)
        return messages_of(reasoner)

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


def test_the_tokens_of_an_input_can_be_counted(reasoner: RunningServer, client: openai.OpenAI) -> None:
    before = len(reasoner.events("submit"))
    first = client.responses.input_tokens.count(model=MODEL, input="one", instructions="be brief", tools=[TOOL])
    assert (first.object, len(reasoner.events("submit"))) == ("response.input_tokens", before)  # nothing is generated
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


def test_a_deleted_response_is_gone(reasoner: RunningServer, client: openai.OpenAI) -> None:
    answer = ask(client)
    assert reasoner.http.delete(f"/v1/responses/{answer.id}").json() == {
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


def test_a_query_is_checked_and_read_whole(reasoner: RunningServer, client: openai.OpenAI) -> None:
    path = f"/v1/responses/{ask(client).id}"
    for query, param in (
        ("stream=yes", "stream"),
        ("stream=true", "stream"),
        ("starting_after=1", "starting_after"),
        ("include=all", "include"),
        ("include[]=message.output_text.logprobs", "include"),
        ("stream=true&stream=true", "stream"),
    ):
        answer = reasoner.http.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = reasoner.http.get(f"{path}?include[]=web_search_call.results&page=3")
    assert (answer.status_code, answer.headers["x-atlas-ignored-fields"]) == (200, "page")


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
