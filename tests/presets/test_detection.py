"""Which parser a template asks for: checked by parsing what the template itself renders."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atlas.parsers import MARKERS, TOOL_FORMATS, AnswerParser, collect
from atlas.presets.detection import REASONING_SIGNS, TOOL_SIGNS, detect
from atlas.text.chat_template import ChatTemplate
from tests.presets import templates as known

FORMATS = {
    "hermes": known.QWEN3,
    "qwen3_coder": known.QWEN35,
    "glm": known.chatml(known.GLM_CALL),
    "minimax": known.chatml(known.MINIMAX_CALL),
    "deepseek": known.DEEPSEEK_V31,
    "deepseek_v32": known.chatml(known.DSML_CALL),
    "mistral": known.chatml(known.MISTRAL_CALL),
    "llama3_json": known.LLAMA31,
}
ARGUMENTS = {"city": "Zürich", "days": 3, "units": {"wind": ["m/s"]}, "note": '"quoted" {brace} <b>'}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": "object"},
                    "note": {"type": "string"},
                },
            },
        },
    }
]


def tool_format(template: str) -> str | None:
    return detect(template, TOOL_SIGNS, "tool calls").name


@pytest.mark.parametrize("name", FORMATS)
def test_the_parser_reads_what_the_template_renders(name: str) -> None:
    assert tool_format(FORMATS[name]) == name
    call = {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    turns: Any = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = ChatTemplate(FORMATS[name], {}).render(turns, tools=TOOLS, add_generation_prompt=False)
    start = "assistant<|end_header_id|>\n\n" if name == "llama3_json" else "assistant\n"
    said = text.split(start)[1].replace("<|im_end|>", "").replace("<|eot_id|>", "")
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    parser = AnswerParser(TOOL_FORMATS[name], tools)
    answer = collect([*parser.feed(said), *parser.finish()])
    (read,) = answer.calls
    assert (read.name, json.loads(read.arguments)) == ("get_weather", ARGUMENTS)
    assert not answer.content.strip()


def test_every_parser_has_a_sign() -> None:
    assert {sign.name for sign in TOOL_SIGNS} - {""} == TOOL_FORMATS.keys()
    # What tells an R1 that leaves the opening marker out is its maker, not its template.
    assert {sign.name for sign in REASONING_SIGNS} == MARKERS.keys() - {"deepseek_r1"}
    assert all(sign.reason for sign in (*TOOL_SIGNS, *REASONING_SIGNS))


@pytest.mark.parametrize(
    ("template", "word"),
    [
        (known.chatml(), "shows no tool calls"),
        (known.GEMMA3, "shows no tool calls"),
        (known.LLAMA3, "shows no tool calls"),
        (known.SMOLLM2, "shows no tool calls"),
        # Two notations: none, and both are named.
        (known.chatml(known.HERMES_CALL + known.MISTRAL_CALL), "fits several"),
        (known.chatml(known.XML_CALL + known.GLM_CALL), "fits several"),
        # Notations without a parser, which look much like others.
        (known.chatml("{{ tools }}<tool_call>[{'name': 1, 'arguments': 2}]</tool_call>"), "JSON list between"),
        (known.chatml("{{ tools }}<|tool_call|>[{'name': 1, 'arguments': 2}]"), "Granite"),
        (known.chatml(known.DSML_CALL.replace("function_calls", "tool_calls")), "DeepSeek V4"),
        (known.chatml("{{ tools }}<seed:tool_call><function=f><parameter=a>"), "Seed-OSS"),
        (known.chatml("{{ tools }}<tool_calls>[{'name': 1, 'arguments': 2}]</tool_calls>"), "shows no tool calls"),
        # The words of a notation in a template that takes no tools are text.
        ("{{ messages }} <tool_call> </tool_call> 'arguments'", "shows no tool calls"),
    ],
)
def test_no_parser_rather_than_a_wrong_one(template: str, word: str) -> None:
    found = detect(template, TOOL_SIGNS, "tool calls")
    assert found.name is None
    assert word in found.reason


def test_reasoning() -> None:
    for template, name in (
        (known.QWEN3, "think"),
        (known.DEEPSEEK_V31, "think"),
        (known.GEMMA4, "gemma"),
        (known.chatml("[THINK][/THINK]"), "mistral"),
        (known.QWEN3_INSTRUCT, None),
        (known.LLAMA31, None),
        (known.chatml("[THINK]</think>"), None),
    ):
        assert detect(template, REASONING_SIGNS, "reasoning").name == name, template
