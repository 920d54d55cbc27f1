"""Bodies of /v1/messages as chat requests: what thinking and effort mean to each kind of model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.config import ServeConfig
from atlas.presets import Presets
from atlas.serve.anthropic.requests import SAMPLING, MessagesRequest, read
from atlas.serve.anthropic.translate import Translation, callers_words, translate
from atlas.serve.errors import ApiError, invalid, unknown
from atlas.serve.openai.requests import ChatRequest
from atlas.serve.reasoning import reasoning_of
from atlas.text.chat_template import ChatTemplate
from atlas.text.messages import turns as messages_for_templates

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
TEMPLATES = {
    "plain": TURNS,
    "switch": TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "always": TURNS + "<think>\n",
    "unmarked": TURNS + "{% if enable_thinking %}Think first.{% endif %}",
    "graded": "effort {{ reasoning_effort or 'medium' }}" + TURNS,
    "both": "{{ reasoning_effort }}" + TURNS + "{% if not enable_thinking %}<think></think>{% endif %}",
}


def presets(kind: str) -> Presets:
    parser = "none" if kind in ("plain", "unmarked") else "think"
    settings = ServeConfig(reasoning_parser=parser)  # type: ignore[arg-type]  # a literal
    return Presets.of({}, {}, ChatTemplate(TEMPLATES[kind], {}), settings, presets=())


PRESETS = {kind: presets(kind) for kind in TEMPLATES}


def translated(kind: str, **fields: Any) -> Translation:
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], **fields}
    request, _ = read(json.dumps(body).encode(), MessagesRequest)
    return translate(request, PRESETS[kind])


ON, OFF = {"type": "enabled", "budget_tokens": 2048}, {"type": "disabled"}
ADAPTIVE = {"type": "adaptive"}


@pytest.mark.parametrize(
    ("kind", "thinking", "effort", "variables", "budget", "unread"),
    [
        # A model without reasoning keeps to every limit of it; nothing is refused, and it is told.
        ("plain", None, None, {}, None, []),
        ("plain", ON, None, {}, None, ["thinking"]),
        ("plain", ADAPTIVE, "high", {}, None, ["thinking", "output_config.effort"]),
        ("plain", OFF, None, {}, None, []),
        ("switch", None, None, {}, None, []),
        ("switch", ON, None, {"enable_thinking": True}, 2048, []),
        ("switch", ADAPTIVE, None, {"enable_thinking": True}, None, []),
        ("switch", {**ADAPTIVE, "budget_tokens": 9}, None, {"enable_thinking": True}, 9, []),
        ("switch", OFF, None, {"enable_thinking": False}, None, []),
        ("switch", OFF, "low", {"enable_thinking": False}, None, ["output_config.effort"]),
        ("switch", None, "high", {}, None, ["output_config.effort"]),
        ("unmarked", ON, None, {"enable_thinking": True}, None, ["thinking.budget_tokens"]),
        ("always", None, None, {}, None, []),
        ("always", ON, None, {}, 2048, []),
        ("always", ADAPTIVE, "max", {}, None, ["output_config.effort"]),
        ("always", OFF, None, {}, 0, []),
        ("graded", ON, "low", {"reasoning_effort": "low"}, 2048, []),
        ("graded", ADAPTIVE, "max", {"reasoning_effort": "high"}, None, []),
        ("graded", None, "medium", {"reasoning_effort": "medium"}, None, []),
        ("graded", OFF, None, {"reasoning_effort": "none"}, None, []),
        ("both", ADAPTIVE, "xhigh", {"enable_thinking": True, "reasoning_effort": "high"}, None, []),
    ],
)
def test_thinking(
    kind: str, thinking: Any, effort: str | None, variables: dict[str, Any], budget: int | None, unread: list[str]
) -> None:
    translation = translated(kind, thinking=thinking, output_config=effort and {"effort": effort})
    assert translation.unread == unread
    reasoning = reasoning_of(translation.chat, PRESETS[kind])
    assert (reasoning.asked.variables, reasoning.budget, reasoning.asked.ignored) == (variables, budget, [])


def effort(*turns: dict[str, Any], **fields: Any) -> str | None:
    return translated("graded", messages=list(turns), **fields).chat.reasoning_effort


def test_effort_of_one_turn() -> None:
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    low = {"role": "system", "content": "", "output_config": {"effort": "low"}}
    high = {"output_config": {"effort": "high"}}
    assert effort(user, low, **high) == effort(user, low) == effort(user, low, {**low, "output_config": None}) == "low"
    assert effort(user, low, answer, user, **high) == "high"
    assert effort(user, low, answer, user) is None
    # Calls and their results belong to the turn.
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
    assert effort(user, low, call, result, call, result, **high) == "low"
    assert effort(user, low, call, result, answer, user, **high) == "high"
    assert translated("plain", messages=[user, low]).unread == ["messages[1].output_config.effort"]


def offered(*turns: dict[str, Any], **fields: Any) -> list[str]:
    user = {"role": "user", "content": "hi"}
    chat = translated("plain", messages=[user, *turns, user], **fields).chat
    return [tool.function.name for tool in chat.tools or []]


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def change(kind: str, name: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": {"type": "tool_reference", "name": name}}]}


def found(name: str) -> dict[str, Any]:
    part = {"type": "tool_reference", "tool_name": name}
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [part]}]}


def test_the_roles_that_an_error_names_are_those_of_this_api() -> None:
    with pytest.raises(ApiError) as caught:
        read(b'{"max_tokens": 5, "messages": [{"role": "tool", "content": "a"}]}', MessagesRequest)
    assert caught.value.body.message.endswith('unknown role "tool"; accepted: "assistant" or "system" or "user"')


def test_a_schema_may_have_nulls_where_the_official_type_has() -> None:
    schema = {"type": "object", "properties": None, "required": None, "default": None}
    (given,) = translated("plain", tools=[{"name": "f", "input_schema": schema}]).chat.tools or []
    assert given.function.parameters == {"type": "object", "default": None}


def test_the_tools_that_a_conversation_has_come_to_offer() -> None:
    tools = [tool("a"), tool("b", defer_loading=True), tool("c")]
    assert offered(tools=tools) == ["a", "c"]
    assert offered(found("b"), tools=tools) == offered(change("tool_addition", "b"), tools=tools) == ["a", "b", "c"]
    assert offered(change("tool_removal", "a"), tools=tools) == ["c"]
    assert offered(change("tool_removal", "a"), change("tool_addition", "a"), tools=tools) == ["a", "c"]
    inline = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("d")}}
    assert offered({"role": "system", "content": [inline]}, tools=tools) == ["a", "c", "d"]
    for turn, path in (
        (found("z"), "messages.1.content.0.content.0.tool_name"),
        (change("tool_removal", "z"), "messages.1.content.0.tool.name"),
    ):
        with pytest.raises(ApiError) as caught, callers_words():
            offered(turn, tools=tools)
        assert caught.value.body.param == path


REFUSED = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
EACH = "[{{ m.role }}]{{ m.content }}"
LATE = {
    "anywhere": TURNS,
    "first only": "{% for m in messages %}" + REFUSED + EACH + "{% endfor %}[assistant]",
    "dropped": "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    + EACH
    + "{% endif %}{% endfor %}[assistant]",
}


@pytest.mark.parametrize("kind", LATE)
def test_turns_of_the_system_after_those_of_the_user(kind: str) -> None:
    template = ChatTemplate(LATE[kind], {})
    model = Presets.of({}, {}, template, ServeConfig(), presets=())
    assert model.switches.late_system is (kind == "anywhere")

    def rendered(*turns: tuple[str, str], **late: Any) -> str:
        messages = [{"role": role, "content": text, **(late if role == "system" else {})} for role, text in turns]
        body = {"max_tokens": 8, "messages": messages, "system": "Be kind."}
        chat = translate(read(json.dumps(body).encode(), MessagesRequest)[0], model).chat
        return template.render(list_of(chat, str))

    def list_of(chat: ChatRequest, guard: Any) -> Any:
        return messages_for_templates(chat.messages, guard, template)

    late = "[system]Now." if kind == "anywhere" else "\n<system-reminder>\nNow.\n</system-reminder>"
    first = "[system]Be kind.[user]hi"
    assert rendered(("user", "hi"), ("system", "Now.")) == f"{first}{late}[assistant]"
    assert rendered(("system", "Now."), ("user", "hi")) == "[system]Be kind.\nNow.[user]hi[assistant]"
    conversation = (("user", "hi"), ("system", "Now."), ("assistant", "yes"), ("user", "hi"))
    assert rendered(*conversation) == f"{first}{late}[assistant]yes[user]hi[assistant]"
    assert rendered(*conversation, clear_at="next_user_message") == f"{first}[assistant]yes[user]hi[assistant]"
    assert rendered(*conversation[:2], clear_at="next_user_message") == f"{first}{late}[assistant]"


def test_a_format_is_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        chat = translated("plain", **fields).chat
        assert chat.response_format["type"] == "json_schema"
        assert chat.response_format["json_schema"]["schema"] == schema
    with pytest.raises(ApiError, match="output_format: another format"):
        translated("plain", output_format=wanted, output_config={"format": {**wanted, "schema": {}}})


def test_every_sampling_field_is_one_of_chat() -> None:
    assert set(SAMPLING) <= set(ChatRequest.__struct_fields__)
    assert {"temperature", "top_k", "seed", "priority", "max_tokens"} <= set(SAMPLING)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def mostly(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What a field may be, and one time in thirty anything."""
    return st.integers(0, 29).flatmap(lambda n: right if n else JSON)


def struct(required: dict[str, Any], **optional: Any) -> st.SearchStrategy[Any]:
    """An object with most of its fields right."""
    return mostly(
        st.fixed_dictionaries(
            {name: mostly(value) for name, value in required.items()},
            optional={name: mostly(value) for name, value in optional.items()},
        )
    )


def several(item: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return mostly(st.lists(item, max_size=4))


WORD, OBJECT = st.text(max_size=4), st.dictionaries(st.text(max_size=4), JSON, max_size=2)
TEXT = struct({"type": st.just("text"), "text": WORD}, cache_control=OBJECT, citations=st.none())
REFERENCE = struct({"type": st.just("tool_reference"), "tool_name": WORD, "name": WORD})
RESULT = struct(
    {"type": st.just("tool_result"), "tool_use_id": WORD},
    content=WORD | several(TEXT | REFERENCE),
    is_error=st.booleans(),
)
CHANGE = struct({"type": st.sampled_from(["tool_addition", "tool_removal"]), "tool": REFERENCE})
THOUGHT = struct({"type": st.just("thinking"), "thinking": WORD, "signature": WORD | st.just("atlas-thinking-eA==")})
REDACTED = struct({"type": st.just("redacted_thinking"), "data": WORD})
USE = struct({"type": st.just("tool_use"), "id": WORD, "name": WORD, "input": OBJECT})
TURN = struct({"role": st.just("user"), "content": WORD | several(TEXT | RESULT)}) | struct(
    {"role": st.just("assistant"), "content": WORD | several(TEXT | THOUGHT | REDACTED | USE)}
)
TURN |= struct(
    {"role": st.just("system"), "content": WORD | several(TEXT | CHANGE)},
    clear_at=st.just("next_user_message"),
    output_config=struct({}, effort=st.just("high")),
)
BODY = struct(
    {"messages": several(TURN), "max_tokens": st.integers(1, 9)},
    system=WORD | several(TEXT),
    tools=several(struct({"name": WORD, "input_schema": OBJECT}, defer_loading=st.booleans())),
    tool_choice=struct({"type": st.sampled_from(["any", "auto"])}),
    thinking=struct({"type": st.sampled_from(["enabled", "adaptive", "disabled"])}, budget_tokens=st.integers(0, 3)),
    output_config=struct({}, effort=st.sampled_from(["low", "max"])),
    stop_sequences=several(WORD),
)


@given(BODY, st.sampled_from(sorted(TEMPLATES)))
def test_whatever_a_body_holds_it_is_a_request_or_an_error(body: Any, kind: str) -> None:
    try:
        request, ignored = read(json.dumps(body).encode(), MessagesRequest)
        translation = translate(request, PRESETS[kind])
    except ApiError as error:
        assert error.status == 400 and error.body.code and len(error.body.message) < 4000
    else:
        assert len(translation.messages) == len(translation.chat.messages)
        assert all(isinstance(path, str) for path in ignored)


HERE = Translation(
    ChatRequest(messages=[]),
    messages=["system", "messages.0", "messages.2.content.1"],
    tools=["tools.0", "tools.2", "messages.1.content.0.tool.definition"],
    unread=[],
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("messages", "messages"),
        ("messages[0].content", "system"),
        ("messages[1].content[3].text", "messages.0"),
        ("messages[2]", "messages.2.content.1"),
        ("messages[2].tool_calls[0].function.arguments", "messages.2.content.1.tool_calls.0.function.arguments"),
        ("stop", "stop_sequences"),
        ("stop[3]", "stop_sequences.3"),
        ("stop_token_ids[3]", "stop_token_ids.3"),
        ("tools[1].function.parameters.properties", "tools.2.input_schema.properties"),
        ("tools[1].function.name", "tools.2.name"),
        ("tools[2].function.parameters", "messages.1.content.0.tool.definition.input_schema"),
        ("tools", "tools"),
        ("tool_choice", "tool_choice"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("thinking_budget", "thinking.budget_tokens"),
        ("reasoning_effort", "output_config.effort"),
        ("response_format.json_schema.schema.properties.a", "output_config.format.schema.properties.a"),
        ("response_format", "output_config.format"),
        ("max_tokens", "max_tokens"),
    ],
)
def test_errors_are_about_what_the_caller_wrote(path: str, expected: str) -> None:
    with pytest.raises(ApiError) as caught, callers_words(HERE):
        raise invalid(path, "7", "8")
    assert caught.value.body.param == expected
    assert caught.value.body.message == f"{expected}: 7; accepted: 8"


def test_fields_that_nothing_reads_are_the_callers_own() -> None:
    with pytest.raises(ApiError) as caught, callers_words(HERE):
        raise unknown("messages[1].content[0].data", "no field of this request")
    assert caught.value.body.param == "messages.1.content.0.data"


def test_an_error_without_a_field_stays_what_it_is() -> None:
    with pytest.raises(ApiError) as caught, callers_words(HERE):
        raise ApiError(503, "server_loading", "the server is loading", headers={"Retry-After": "5"})
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "5"})
    assert caught.value.body.message == "the server is loading"
