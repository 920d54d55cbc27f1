"""/tokenize and /detokenize: what a prompt becomes is what the engine gets, and back again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_harness import EOT, RunningServer, Start, eventually, ids_of

from tests.checkpoints import cases

YO = [{"role": "user", "content": "yo"}]


def ask(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 512
    return answer


def text_of(server: RunningServer, tokens: list[int]) -> str:
    response = server.http.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 200, response.text
    return str(response.json()["prompt"])


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "yo"}, [1, *ids_of("yo")]),
        ({"prompt": "<s>yo"}, [1, *ids_of("yo")]),
        ({"prompt": "yo", "add_special_tokens": False}, ids_of("yo")),
        ({"prompt": "a<|eot|>"}, [1, *ids_of("a"), EOT]),
        ({"prompt": ""}, [1]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"messages": YO}, [1, 4, *ids_of("yo"), EOT, 5]),
        ({"messages": YO, "add_generation_prompt": False}, [1, 4, *ids_of("yo"), EOT]),
        (
            {"messages": [*YO, {"role": "assistant", "content": "a"}], "continue_final_message": True},
            [1, 4, *ids_of("yo"), EOT, 5, *ids_of("a")],
        ),
        ({"messages": [{"role": "user", "content": "<s>"}]}, [1, 4, *ids_of("<s>"), EOT, 5]),
    ],
)
def test_tokens(shared: RunningServer, body: dict[str, Any], tokens: list[int]) -> None:
    answer = ask(shared, **body)
    assert answer["tokens"] == tokens and answer["token_strs"] is None


@pytest.mark.parametrize("body", [{"prompt": "yo 😀"}, {"messages": [*YO, {"role": "assistant", "content": "a"}, *YO]}])
def test_the_engine_gets_the_same(shared: RunningServer, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    assert shared.http.post(path, json={**body, "max_tokens": 1}).status_code == 200
    assert shared.events("submit")[-1]["prompt"] == ask(shared, **body)["tokens"]


def test_tokens_as_strings(shared: RunningServer, checkpoint: Path) -> None:
    reference = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    answer = ask(shared, prompt="a é<|eot|>", return_token_strs=True)
    assert answer["token_strs"] == reference.encode("a é<|eot|>").tokens


def test_a_text_longer_than_the_context(shared: RunningServer) -> None:
    assert ask(shared, prompt="x" * 20_000)["count"] == 20_001
    assert ask(shared, messages=[{"role": "user", "content": "x" * 20_000}])["count"] == 20_004


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_there_is_an_end_to_it(shared: RunningServer, letter: str) -> None:
    response = shared.http.post("/tokenize", json={"prompt": letter * ((4 << 20) // len(letter.encode()) + 1)})
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (
        "string_above_max_length",
        "prompt",
    )


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_there_and_back(shared: RunningServer, text: str) -> None:
    assert text_of(shared, ask(shared, prompt=text, add_special_tokens=False)["tokens"]) == text


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.integers(0, 319)))
def test_any_ids_have_a_text(shared: RunningServer, checkpoint: Path, tokens: list[int]) -> None:
    reference = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert text_of(shared, tokens) == reference.decode(tokens, skip_special_tokens=False)


def test_special_tokens_are_spelled(shared: RunningServer) -> None:
    assert text_of(shared, [1, 4, *ids_of("yo"), EOT, 5]) == "<s><|user|>yo<|eot|><|assistant|>"


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "missing_required_parameter", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": YO}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "invalid_value", "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "invalid_value", "tools"),
        ("/tokenize", {"messages": YO, "add_special_tokens": True}, "invalid_value", "add_special_tokens"),
        ("/tokenize", {"messages": YO, "continue_final_message": True}, "invalid_value", "continue_final_message"),
        ("/tokenize", {"messages": YO, "chat_template": "x"}, "unsupported_parameter", "chat_template"),
        ("/tokenize", {"messages": []}, "empty_array", "messages"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, "chat_template_error", "messages"),
        ("/tokenize", {"prompt": 3}, "invalid_value", "prompt"),
        ("/detokenize", {}, "missing_required_parameter", "tokens"),
        ("/detokenize", {"tokens": "a"}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "invalid_value", "tokens[1]"),
        ("/detokenize", {"tokens": [320]}, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": [1, True]}, "invalid_value", "tokens[1]"),
    ],
)
def test_errors(shared: RunningServer, path: str, body: dict[str, Any], code: str, param: str | None) -> None:
    response = shared.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    assert param is None or error["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model(shared: RunningServer, path: str) -> None:
    response = shared.http.post(path, json={"model": "gpt-4", "prompt": "a", "tokens": [1]})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_unknown_fields_are_reported(shared: RunningServer) -> None:
    body = {"messages": [{**YO[0], "mood": 1}], "chat_template_kwargs": {"x": 1}, "prompts": 1}
    reported = shared.http.post("/tokenize", json=body).headers["x-atlas-ignored-fields"]
    assert reported == "messages[].mood, prompts, chat_template_kwargs.x"


def test_while_the_model_loads(start: Start) -> None:
    server = start(load_seconds=30)
    eventually(lambda: server.health() == 503)
    assert server.http.get("/health/live").json() == {"status": "ok"}
    assert server.http.get("/version").status_code == server.http.get("/docs").status_code == 200
    assert server.http.post("/tokenize", json={"prompt": "a"}).json()["error"]["code"] == "server_loading"


@pytest.mark.skipif(cases.folder() is None, reason=f"{cases.VARIABLE} is not set")
def test_a_rich_template(start: Start) -> None:
    """One BOS, and the text and the ids that are known."""
    known = cases.expected()["script"]["s06-template-rich"]
    server = start(model=cases.path("script", "s06-template-rich")).wait_ready()
    messages = json.loads(json.dumps(known["messages"]))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    answer = server.http.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == known["ids"] and answer["tokens"].count(1) == known["bos_count"]
    assert text_of(server, answer["tokens"]) == known["rendered"]
    refused = server.http.post("/tokenize", json={"messages": known["error_messages"]})
    assert refused.status_code == known["error_status"]
    assert known["error_contains"] in refused.json()["error"]["message"]
