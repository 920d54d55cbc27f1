"""`llm`, the command-line tool, with the server among its models as its documentation says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.clients.asking import GREEDY, STORY, TURNS
from tests.serve.real_server import MODEL, RealServer

OPTIONS = ["-o", "temperature", "0", "-o", "max_tokens", "12"]
QUESTION = "Say hello."
Run = Callable[..., str]


@pytest.fixture
def run(server: RealServer, tmp_path: Path) -> Run:
    """Runs `llm` with a home of its own."""
    entries = [{"model_id": "atlas", "model_name": MODEL, "api_base": server.url + "/v1"}]
    entries[0] |= {"supports_schema": True, "supports_tools": True}  # type: ignore[dict-item]
    entries.append({**entries[0], "model_id": "atlas-text", "completion": True})  # type: ignore[dict-item]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(entries))  # JSON is YAML

    def run(*arguments: str, text: str | None = None, fails: bool = False) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            input=text,
            stdin=None if text is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"},
        )
        assert (result.returncode != 0) == fails, result.stderr
        return result.stderr if fails else result.stdout.removesuffix("\n")

    return run


def answer_of(client: openai.OpenAI, messages: Any) -> Any:
    return client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content


def test_a_prompt_streamed_and_whole(run: Run, client: openai.OpenAI) -> None:
    """With the usage that is logged of each."""
    whole = client.chat.completions.create(messages=STORY, **GREEDY)
    assert whole.usage is not None
    for flags in ([], ["--no-stream"]):
        assert run("-m", "atlas", *flags, *OPTIONS, STORY[0]["content"]) == whole.choices[0].message.content
        entry = json.loads(run("logs", "--json", "-n", "1"))[0]
        assert (entry["input_tokens"], entry["output_tokens"]) == (whole.usage.prompt_tokens, 12)


def test_a_conversation_goes_on(run: Run, client: openai.OpenAI) -> None:
    first = run("-m", "atlas", *OPTIONS, TURNS[0]["content"])
    second = run("-c", *OPTIONS, TURNS[2]["content"])
    turns: Any = [TURNS[0], {"role": "assistant", "content": first}, TURNS[2]]
    assert second == answer_of(client, turns) != answer_of(client, TURNS[2:])


def test_a_system_prompt_and_a_piped_text(run: Run, client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Your name is Zorblax."},
        {"role": "user", "content": "What is your name?"},
    ]
    assert "Zorblax" in answer_of(client, messages)
    assert run("-m", "atlas", *OPTIONS, "-s", messages[0]["content"], text=messages[1]["content"]) == answer_of(
        client, messages
    )


def test_a_text_completion(run: Run, client: openai.OpenAI) -> None:
    listed = run("models", "list")
    assert "OpenAI Chat: atlas" in listed and "OpenAI Completion: atlas-text" in listed
    prompt = "The capital of France is"
    expected = client.completions.create(prompt=prompt, **GREEDY).choices[0].text
    assert run("-m", "atlas-text", *OPTIONS, prompt) == expected


def test_a_schema(run: Run) -> None:
    options = [*OPTIONS[:3], "-o", "max_tokens", "60"]
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
        "required": ["kind", "legs"],
        "additionalProperties": False,
    }
    streamed = run("-m", "atlas", *options, "--schema", json.dumps(schema), "Describe a cat.")
    jsonschema.validate(json.loads(streamed), schema)
    assert run("-m", "atlas", "--no-stream", *options, "--schema", json.dumps(schema), "Describe a cat.") == streamed


def test_functions_are_offered(run: Run, client: openai.OpenAI) -> None:
    code = 'def multiply(a: int, b: int) -> int:\n    "Multiply"\n    return a * b\n'
    text = run("-m", "atlas", *OPTIONS, "--functions", code, "--td", QUESTION)
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tool: Any = {"name": "multiply", "description": "Multiply", "parameters": {**parameters, "required": ["a", "b"]}}
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], tools=[{"type": "function", "function": tool}], **GREEDY
    )
    assert text.splitlines()[-1:] == answer.choices[0].message.content.splitlines()[-1:]


def test_an_interactive_chat(run: Run) -> None:
    output = run("chat", "-m", "atlas", *OPTIONS, text=f"{TURNS[0]['content']}\n{TURNS[2]['content']}\nquit\n")
    assert output.count("Zorblax") >= 2


def test_an_error_is_told(run: Run) -> None:
    told = run("-m", "atlas", "-o", "max_tokens", "-1", "x", fails=True)
    assert "max_tokens" in told and "Traceback" not in told
