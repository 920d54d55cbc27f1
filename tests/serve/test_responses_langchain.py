"""LangChain's ChatOpenAI with the Responses API: a tool called, its result given back, a stream put together."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from responses_server import MODEL, TOOL, messages_of
from serve_harness import RunningServer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reasoning": {"summary": "auto"}},
        {"use_previous_response_id": True},
        {"output_version": "responses/v1", "include": ["reasoning.encrypted_content"], "store": False},
    ],
    ids=["plain", "summary", "previous", "stateless"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_goes_round(reasoner: RunningServer, options: dict[str, Any], stream: bool) -> None:
    model = ChatOpenAI(
        model=MODEL,
        base_url=reasoner.url + "/v1",
        api_key="none",  # type: ignore[arg-type]
        use_responses_api=True,
        max_retries=0,
        extra_body={"seed": 7},
        **options,
    )
    asked: list[AnyMessage] = [HumanMessage("add 1 and 2")]
    with_tools = model.bind_tools([TOOL])
    answer: Any = reduce(add, with_tools.stream(asked)) if stream else with_tools.invoke(asked)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"], answer.text) == ("add", {"a": 1, "b": 2}, "Let me see.")
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
    with_tools.invoke([*asked, answer, ToolMessage("3", tool_call_id=call["id"])])
    user, assistant, tool = messages_of(reasoner)
    assert (user["content"], tool["content"], tool["tool_call_id"]) == ("add 1 and 2", "3", call["id"])
    assert assistant["content"] == "Let me see."
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    # LangChain keeps of streamed reasoning its id alone, which only helps where the server has the rest.
    if not (stream and options.get("store") is False):
        assert assistant["reasoning_content"] == "to add"
