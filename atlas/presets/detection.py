"""Which parsers an answer needs, told by the text of the model's chat template.

A template shows how the model was taught to write calls and reasoning, for it renders those of the history. Each sign
below is a text that only one notation has. Where two notations fit, or none, no parser is chosen: a call that reaches
the client as text can be seen, a wrong one that was made of text cannot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec


class Sign(msgspec.Struct, frozen=True):
    """name: the parser; "" for a notation that Atlas has no parser of.
    has: patterns that the template must hold, all of them.  lacks: none of these.
    reason: what they are the sign of.
    """

    name: str
    has: tuple[str, ...]
    reason: str
    lacks: tuple[str, ...] = ()

    def holds(self, template: str) -> bool:
        """Whether the template passes."""
        return all(re.search(p, template) for p in self.has) and not any(re.search(p, template) for p in self.lacks)


class Found(msgspec.Struct, frozen=True):
    """A parser's name, or None; and why."""

    name: str | None
    reason: str


_TOOLS = r"\btools\b"

TOOL_SIGNS: Sequence[Sign] = (
    Sign("qwen3_coder", (_TOOLS, "<tool_call>", "<function=", "<parameter="), "calls are <function=...> tags"),
    Sign("glm", (_TOOLS, "<tool_call>", "<arg_key>", "<arg_value>"), "arguments are <arg_key> and <arg_value> tags"),
    Sign("minimax", (_TOOLS, "<?minimax:tool_call>?", "<invoke name="), "calls are <invoke> in <minimax:tool_call>"),
    Sign(
        "hermes",
        (_TOOLS, "<tool_call>", r"</tool_call>", r"\\?[\"']arguments\\?[\"']"),
        "calls are JSON objects between <tool_call> tags",
        lacks=("<function=", "<arg_key>", "<parameter", r"<tool_call>\[", "<tool_calls>"),
    ),
    Sign("deepseek_v32", (_TOOLS, "｜DSML｜", "function_calls"), "calls are <｜DSML｜invoke> tags"),
    Sign("deepseek", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), "calls stand between <｜tool▁call▁begin｜> tags"),
    Sign("mistral", (r"\[TOOL_CALLS\]",), "calls follow [TOOL_CALLS]"),
    Sign(
        "llama3_json",
        (_TOOLS, r"<\|start_header_id\|>", r"\\?[\"']parameters\\?[\"']\s*:", r"\\?[\"']name\\?[\"']\s*:"),
        "calls are bare JSON objects with name and parameters",
        lacks=("<tool_call>", "<function="),
    ),
    Sign("gemma", (_TOOLS, r"<\|tool_call>", "call:"), "calls are call:NAME{...} between <|tool_call> marks"),
)

# What Atlas has no parser of, so that the log can say what it would need.
TOOL_SIGNS = (
    *TOOL_SIGNS,
    Sign("", (r"<\|tool_call\|>",), "calls are a JSON list after <|tool_call|> (Granite, Phi-4), which has no parser"),
    Sign("", (r"<\|tool_call_start\|>",), "calls stand between <|tool_call_start|> marks (LFM2), which has no parser"),
    Sign("", (r"<\|tool_calls_section_begin\|>",), "calls are those of Kimi K2, which has no parser"),
    Sign("", (r"<\|channel\|>", "commentary"), "calls are messages on a channel (Harmony), which has no parser"),
    Sign("", (_TOOLS, r"<tool_call>\["), "calls are a JSON list between <tool_call> tags, which has no parser"),
    Sign("", ("｜DSML｜", r"\btool_calls>"), "calls are those of DeepSeek V4, which has no parser"),
    Sign("", (_TOOLS, "<seed:tool_call>"), "calls are those of Seed-OSS, which has no parser"),
)

REASONING_SIGNS: Sequence[Sign] = (
    Sign("gemma", (r"<\|channel>",), "reasoning is the channel <|channel>thought"),
    Sign("mistral", (r"\[THINK\]",), "reasoning stands between [THINK] and [/THINK]"),
    Sign("think", ("</think>",), "reasoning stands between <think> and </think>"),
)


def detect(template: str, signs: Sequence[Sign], what: str) -> Found:
    """The one parser whose sign the template passes. `what` is parsed, in words, for the reason."""
    held = [sign for sign in signs if sign.holds(template)]
    names: Mapping[str, str] = {sign.name: sign.reason for sign in held}
    if len(names) == 1:
        ((name, reason),) = names.items()
        return Found(name or None, f"the chat template: {reason}")
    if not names:
        return Found(None, f"the chat template shows no {what} that Atlas knows")
    return Found(None, f"the chat template fits several: {'; '.join(sorted(names.values()))}")
