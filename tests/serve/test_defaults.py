"""Defaults as a client meets them: sampling that follows the thinking switch, and what is said of where it is from."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atlas.engine.messages import SamplingParams
from atlas.engine.sampling_defaults import RANGES
from tests.presets import templates as known
from tests.serve.in_process import Server, make_model
from tests.serve.serve_harness import Start, environment, make_checkpoint

YO: Any = [{"role": "user", "content": "yo"}]
THINKING, PLAIN = (0.6, 0.95, 20), (0.7, 0.8, 20)


def qwen3(folder: Path, template: str = known.QWEN3, **generation_config: Any) -> Path:
    """A checkpoint that passes for a Qwen3."""
    model = make_model(folder, chat_template=template, special=["<think>", "</think>"])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    if generation_config:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], **generation_config}))
    return model


def seen(sampling: SamplingParams) -> tuple[float, float, int]:
    return sampling.temperature, sampling.top_p, sampling.top_k


@pytest.mark.parametrize(
    ("settings", "fields", "thinks", "expected"),
    [
        ({}, {}, True, THINKING),
        ({}, {"enable_thinking": False}, False, PLAIN),
        ({}, {"chat_template_kwargs": {"enable_thinking": False}}, False, PLAIN),
        ({}, {"reasoning_effort": "none"}, False, PLAIN),
        ({}, {"enable_thinking": True}, True, THINKING),
        ({"enable_thinking": False}, {}, False, PLAIN),
        ({"enable_thinking": False}, {"enable_thinking": True}, True, THINKING),
        # A setting is above the preset in both modes; the request is above all, field by field.
        ({"default_sampling": {"temperature": 0.1}}, {}, True, (0.1, 0.95, 20)),
        ({"default_sampling": {"temperature": 0.1}}, {"enable_thinking": False}, False, (0.1, 0.8, 20)),
        ({"default_sampling": {"temperature": 0.1}}, {"temperature": 0.9, "top_k": 3}, True, (0.9, 0.95, 3)),
        ({}, {"enable_thinking": False, "top_p": 1.0}, False, (0.7, 1.0, 20)),
    ],
)
def test_the_thinking_switch_chooses_the_sampling(
    tmp_path: Path,
    settings: dict[str, Any],
    fields: dict[str, Any],
    thinks: bool,
    expected: tuple[float, float, int],
) -> None:
    async def run() -> None:
        server = Server(qwen3(tmp_path / "model"), **settings)
        server.say_text(1, "Hi")
        await server.chat(messages=YO, seed=1, **fields)
        ((prompt, sampling),) = server.engine.submitted
        assert seen(sampling) == expected
        # The prompt says the same: it ends with an empty block where there is to be no reasoning.
        (end,) = server.frontend.tokenizer.encode("</think>", add_special_tokens=False)
        assert (end in prompt) is not thinks

    asyncio.run(run())


def test_wishes_that_the_template_has_no_use_for(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(qwen3(tmp_path / "model", known.QWEN3_INSTRUCT))
        server.say_text(1, "Hi")
        for fields, ignored in (
            ({"enable_thinking": False}, "enable_thinking"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
            ({"reasoning_effort": "high"}, "reasoning_effort"),
        ):
            response = await server.post(messages=YO, seed=1, **fields)
            assert response.status_code == 200, response.text
            assert response.headers["x-atlas-ignored-fields"] == ignored
        response = await server.post(messages=YO, seed=1, enable_thinking=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "enable_thinking")
        strict = Server(qwen3(tmp_path / "other", known.QWEN3_INSTRUCT), strict_fields=True)
        for name, value in (("enable_thinking", False), ("reasoning_effort", "high")):
            response = await strict.post(messages=YO, **{name: value})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "unknown_parameter", name)
            assert error["message"].startswith(f"{name}: this model's template has no switch for it; ")
        response = await strict.post("/v1/responses", input="yo", reasoning={"effort": "high"})
        message = response.json()["error"]["message"]
        assert message.startswith("reasoning.effort: this model's template has no switch for it; ")
        effort = {"messages": YO, "max_tokens": 1, "output_config": {"effort": "high"}}
        message = (await strict.post("/v1/messages", **effort)).json()["error"]["message"]
        assert message.startswith("output_config.effort: this model's template has no switch for it; ")

    asyncio.run(run())


def test_every_value_says_where_it_is_from(tmp_path: Path, start: Start) -> None:
    model = qwen3(tmp_path / "model", temperature=0.6, top_p=0.95, top_k=20)
    flags = ("--default-sampling", '{"min_p": 0.1}', "--reasoning-parser", "none", "--api-key", "sk-secret-of-mine")
    server = start(*flags, model=model).wait_ready()
    text = server.http.get("/server_info", headers={"Authorization": "Bearer sk-secret-of-mine"}).text
    info = json.loads(text)
    assert info["presets"]["tool_parser"]["value"] == "hermes"
    assert info["presets"]["tool_parser"]["origin"].startswith("preset qwen3: ")
    assert info["presets"]["reasoning_parser"] == {"value": "none", "origin": "flag"}
    assert info["presets"]["sampling_preset"]["value"] == "qwen3"
    assert info["presets"]["enable_thinking"]["value"] is True
    assert info["sampling"] == info["sampling_by_mode"]["thinking"]
    plain = info["sampling_by_mode"]["plain"]
    assert plain["temperature"] == {"value": 0.7, "origin": "preset qwen3, plain"}
    assert plain["min_p"] == {"value": 0.1, "origin": "flag"}
    assert plain["repetition_penalty"] == {"value": 1.0, "origin": "built-in (OpenAI's)"}
    log = server.output.read_text()
    assert "tool_parser hermes (preset qwen3)," in log and "temperature, plain 0.7 (preset qwen3, plain)" in log
    command = [sys.executable, "-m", "atlas.serve", "--print-config", *flags, str(model)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=True).stdout
    lines = {line.split("=")[0].strip(): line for line in printed.splitlines()}
    assert "hermes" in lines["tool_parser"] and "(preset qwen3: " in lines["tool_parser"]
    assert "none" in lines["reasoning_parser"] and "(flag)" in lines["reasoning_parser"]
    assert "0.7" in lines["temperature, plain"] and "0.6" in lines["temperature, thinking"]
    assert "20" in lines["top_k, plain"] and "0.1" in lines["min_p"] and "(flag)" in lines["min_p"]
    for told in (text, printed, log):
        assert "secret" not in told


def test_a_template_with_calls_of_no_known_kind_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = known.HERMES_CALL + known.MISTRAL_CALL
    model = make_model(tmp_path / "model", chat_template=known.chatml(calls))
    Server(model)
    assert "requests with tools will answer 400" in caplog.text and "fits several" in caplog.text
    caplog.clear()
    Server(model, tool_parser="none")
    Server(model, tool_parser="hermes")
    assert not caplog.text


def test_a_chat_template_of_ones_own(tmp_path: Path, start: Start) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}<|user|>{{ m.content }}{{ '!' if loud else '?' }}<|eot|>{% endfor %}")
    server = start("--chat-template", str(file), model=make_checkpoint(tmp_path / "m", chat_template=None)).wait_ready()
    sizes = []
    for kwargs in ({}, {"loud": True}, {"loud": True, "other": 1}):
        response = server.http.post(
            "/v1/chat/completions", json={"messages": YO, "chat_template_kwargs": kwargs, "max_tokens": 1}
        )
        assert response.status_code == 200, response.text
        sizes.append(response.json()["usage"]["prompt_tokens"])
        assert response.headers.get("x-atlas-ignored-fields", "") == (
            "chat_template_kwargs.other" if "other" in kwargs else ""
        )
    assert sizes == [5, 5, 5]
    prompts = [entry["prompt"] for entry in server.events("submit")]
    assert prompts[0] != prompts[1] == prompts[2]


def test_the_template_for_tools_keeps_the_models_sampling(tmp_path: Path) -> None:
    """docs/tools.md serves SmolLM2 so."""
    file = Path(__file__).parents[2] / "docs" / "chat-templates" / "chatml_tools.jinja"
    own = "{% for m in messages %}{{ m.content }}{% endfor %}{# named SmolLM, trained by Hugging Face #}"
    presets = Server(make_model(tmp_path / "m", chat_template=own), chat_template=str(file)).frontend.presets
    assert (presets.plain.temperature, presets.plain.top_p) == (0.2, 0.9)
    assert presets.tool_format == "hermes" and presets.switches.takes_tools


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chat-template", "/does/not/exist"], ["--chat-template", "/does/not/exist", "No such file"]),
        (["--chat-template", "BROKEN"], ["--chat-template", "line 1", "a Jinja2 template"]),
        (["--enable-thinking"], ["--enable-thinking", "no thinking switch", "leave it out"]),
    ],
)
def test_settings_that_do_not_fit_the_model(tmp_path: Path, start: Start, flags: list[str], words: list[str]) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    flags = [str(broken) if flag == "BROKEN" else flag for flag in flags]
    server = start(*flags)
    assert server.process.wait(30) == 1
    log = server.output.read_text()
    for word in words:
        assert word in log
    assert "Traceback" not in log


def test_the_example_of_the_documentation_is_what_is_printed(smollm2_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "defaults.md").read_text()
    first, *lines = text.split("```console\n$ ")[1].split("```")[0].splitlines()
    command = [str(smollm2_path) if word == "smollm2-135m" else word for word in shlex.split(first)]
    assert command[0] == "python"
    done = subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, timeout=60, env=environment(), check=True
    )
    printed = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) > 6
    at = 0
    for line in lines:
        if line != "...":
            assert line.split() in printed[at:], line
            at = printed.index(line.split())


def test_every_default_reaches_the_engine(tmp_path: Path) -> None:
    """Whatever `--default-sampling` takes, and /server_info tells of, is what a request without the field gets."""
    given = {
        name: least + (min(most, 10) - least) * 0.75 if name != "top_k" else 7 for name, (least, most) in RANGES.items()
    }
    server = Server(make_model(tmp_path / "model"), default_sampling=given)
    server.say_text(1, "answer")
    for path, body in (("/v1/chat/completions", {"messages": YO}), ("/v1/completions", {"prompt": "yo"})):
        assert asyncio.run(server.post(path, seed=1, **body)).status_code == 200
        sampling = server.engine.submitted[-1][1]
        assert {name: getattr(sampling, name) for name in RANGES} == given, path
