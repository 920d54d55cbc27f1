"""What /v1/messages takes and refuses, before a model is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atlas.serve.anthropic.requests import Conversation, MessagesRequest, read
from atlas.serve.errors import ApiError

HI = {"role": "user", "content": "hi"}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "max_tokens": 8, "messages": [HI], **fields}).encode()


def refused(**fields: Any) -> tuple[str | None, str, str]:
    with pytest.raises(ApiError) as caught:
        read(body(**fields), MessagesRequest)
    error = caught.value
    assert error.status == 400
    return error.body.param, error.body.code, error.body.message


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def test_what_agent_tools_send_is_all_known() -> None:
    """A request as Claude Code makes them."""
    request, ignored = read(
        body(
            system=[{"type": "text", "text": "You are", "cache_control": EPHEMERAL}],
            tools=[
                {
                    "name": "Bash",
                    "description": "Runs",
                    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
                    "cache_control": EPHEMERAL,
                    "eager_input_streaming": True,
                },
                {"name": "DeferredToolPlaceholder", "input_schema": {"type": "object"}, "defer_loading": True},
            ],
            tool_choice={"type": "auto", "disable_parallel_tool_use": False},
            thinking={"type": "adaptive", "display": "summarized"},
            metadata={"user_id": "user_1"},
            output_config={"effort": "high"},
            stream=True,
            service_tier="auto",
            cache_control=EPHEMERAL,
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}]},
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "# Environment", "cache_control": EPHEMERAL}],
                    "output_config": {"effort": "medium"},
                    "clear_at": "never",
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "Eq"},
                        {"type": "text", "text": "b", "citations": None},
                        {
                            "type": "tool_use",
                            "id": "t1",
                            "name": "Bash",
                            "input": {"command": "ls"},
                            "caller": {"type": "direct"},
                        },
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "x", "is_error": True},
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "y"}],
                            "cache_control": EPHEMERAL,
                        },
                    ],
                },
            ],
        ),
        MessagesRequest,
    )
    assert ignored == []
    assert request.stream and request.tools and request.tools[0].name == "Bash"


def test_what_nothing_reads_is_told() -> None:
    _, ignored = read(
        body(
            context_management={"edits": []},
            tools=[{"name": "f", "input_schema": {}, "input_examples": []}],
            messages=[HI, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "Eq"}]}, HI],
        ),
        MessagesRequest,
    )
    assert sorted(ignored) == ["context_management", "messages[1].content[0].data", "tools[0].input_examples"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("messages", "param", "found"),
    [
        (user({"type": "text", "text": "a"}, IMAGE), "messages[0].content[1].type", "'image'"),
        (user({"type": "document", "source": {}}), "messages[0].content[0].type", "'document'"),
        (user({"type": "search_result"}), "messages[0].content[0].type", "'search_result'"),
        (user({"type": "tool_use", "id": "a", "name": "f"}), "messages[0].content[0].type", "'tool_use'"),
        (
            user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": ""}, IMAGE]}),
            "messages[0].content[0].content[1].type",
            "'image'",
        ),
        (
            [HI, {"role": "assistant", "content": [{"type": "server_tool_use"}]}],
            "messages[1].content[0].type",
            "'server_tool_use'",
        ),
        ([{"role": "system", "content": [IMAGE]}], "messages[0].content[0].type", "'image'"),
    ],
)
def test_blocks_that_a_text_model_cannot_read(messages: Any, param: str, found: str) -> None:
    path, code, message = refused(messages=messages)
    assert (path, code) == (param, "unsupported_content")
    assert message.startswith(f"{param}: {found} in ") and "; accepted: text" in message


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search_20250305", "web_search_20260318", "web_fetch_20250910", "code_execution_20250825"),
        *("bash_20250124", "text_editor_20250728", "memory_20250818", "computer_toolset_20260801"),
        "tool_search_tool_bm25_20251119",
    ],
)
def test_tools_of_anthropic_are_refused_by_name(kind: str) -> None:
    own = {"name": "f", "input_schema": {"type": "object"}, "type": "custom"}
    path, code, message = refused(tools=[own, {"type": kind, "name": "x", "max_uses": 8}])
    assert (path, code) == ("tools[1].type", "unsupported_parameter") and repr(kind) in message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": None}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"messages": user({"type": "text"})}, "messages[0].content[0].text", "missing_required_parameter"),
        ({"messages": user("x")}, "messages[0].content[0]", "invalid_value"),
        ({"messages": user({"text": "x"})}, "messages[0].content[0].type", "missing_required_parameter"),
        ({"max_tokens": "8"}, "max_tokens", "invalid_value"),
        ({"max_tokens": None}, "max_tokens", "invalid_value"),
        ({"system": [IMAGE]}, "system[0].type", "unsupported_content"),
        ({"system": 3}, "system", "invalid_value"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing_required_parameter"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type", "invalid_value"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "invalid_value"),
        ({"stop_sequences": "x"}, "stop_sequences", "invalid_value"),
        ({"stop_sequences": [1]}, "stop_sequences[0]", "invalid_value"),
        ({"output_config": {"effort": "much"}}, "output_config.effort", "invalid_value"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "unsupported_parameter"),
        ({"container": "c"}, "container", "unsupported_parameter"),
        ({"speed": "fast"}, "speed", "unsupported_parameter"),
        ({"compaction": {"type": "x"}}, "compaction", "unsupported_parameter"),
        ({"thread": {"type": "create"}}, "thread", "thread_unsupported_request"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], param: str, code: str) -> None:
    assert refused(**fields)[:2] == (param, code)


def test_counting_needs_no_max_tokens() -> None:
    request, _ = read(json.dumps({"model": "tiny", "messages": [HI]}).encode(), Conversation)
    assert request.messages[0].content == "hi"
    with pytest.raises(ApiError) as caught:
        read(json.dumps({"model": "tiny", "messages": [HI]}).encode(), MessagesRequest)
    assert caught.value.body.param == "max_tokens"
