"""Each family's calls all the way round: what the template writes of a call in the history is what the model writes, so
the parser that was found for the template must read it back, and the next prompt must have it again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import llguidance
import pytest

from atlas.parsers.grammars import tool_grammar
from tests.presets import templates
from tests.serve.in_process import Server, joined, make_model
from tests.serve.serve_harness import EOT

YO: list[dict[str, Any]] = [{"role": "user", "content": "yo"}]
ARGUMENTS: list[dict[str, Any]] = [
    {
        "text": 'Pa"ris 😀é漢\n  {"a": [1, "</b>"]}\\n',
        "number": 3,
        "flag": True,
        "list": [1, {"ä": None}],
        "map": {"a": 1.5},
    },
    {"text": "3", "flag": False},
    {},
]
TYPES = {"text": "string", "number": "integer", "flag": "boolean", "list": "array", "map": "object"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}},
    },
}
FAMILIES = {
    "hermes": templates.QWEN3,
    "qwen3_coder": templates.QWEN35,
    "deepseek": templates.DEEPSEEK_V31,
    "llama3_json": templates.LLAMA31,
    "glm": templates.chatml(templates.GLM_CALL),
    "minimax": templates.chatml(templates.MINIMAX_CALL),
    "deepseek_v32": templates.chatml(templates.DSML_CALL),
    "mistral": templates.chatml(templates.MISTRAL_CALL),
}


def accepts(server: Server, family: str, text: str) -> bool:
    """Whether the grammar of forced calls lets a text through."""
    tokenizer = server.frontend.tokenizer
    grammar = tool_grammar(family, {"get_weather": TOOL["function"]["parameters"]}, special={}, one=True)
    guidance = llguidance.LLTokenizer(tokenizer.show(frozenset()).to_str(), eos_token=EOT)
    matcher = llguidance.LLMatcher(guidance, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    ids = tokenizer.encode_plain(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_all_the_way_round(tmp_path: Path, family: str) -> None:
    server = Server(make_model(tmp_path / "m", chat_template=FAMILIES[family]))
    assert server.frontend.presets.tool_format == family, "found by the template alone"

    async def prompt_with(*turns: dict[str, Any]) -> str:
        server.say_text(1, "ok")
        await server.chat(messages=[*YO, *turns], seed=1, tools=[TOOL])
        text: str = server.frontend.tokenizer.decode(server.engine.submitted[-1][0])
        return text

    async def main() -> None:
        begin = await prompt_with({"role": "assistant", "content": ""})
        for arguments in ARGUMENTS:
            function = {"name": "get_weather", "arguments": json.dumps(arguments)}
            call = {"id": "a1b2c3d4e", "type": "function", "function": function}
            prompt = await prompt_with({"role": "assistant", "content": "", "tool_calls": [call]})
            # What is there with the call and not without it, before the end of the turn, is the call.
            head = max(begin.rfind(end) for end in ("<|im_end|>", "<|eot_id|>"))
            written = prompt[head : len(prompt) - (len(begin) - head)]
            assert begin[:head] + written + begin[head:] == prompt and "get_weather" in written

            fields: dict[str, Any] = {
                "messages": YO,
                "tools": [TOOL],
                "chat_template_kwargs": {"enable_thinking": False},
            }
            fields["seed"] = server.say_text(2, written, group=3)
            choice = (await server.chat(**fields))["choices"][0]
            (made,) = choice["message"]["tool_calls"]
            assert (made["function"]["name"], choice["finish_reason"]) == ("get_weather", "tool_calls")
            assert json.loads(made["function"]["arguments"]) == arguments
            (streamed,) = joined(await server.stream(**fields))["message"]["tool_calls"]
            assert streamed["function"] == made["function"]
            assert await prompt_with(choice["message"]) == prompt

    asyncio.run(main())
