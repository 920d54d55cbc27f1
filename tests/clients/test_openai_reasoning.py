"""Reasoning through the official client. The model writes no marker by itself: a budget forces it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.clients.asking import CAPITAL, GREEDY

THINK: Any = {"enable_thinking": True}


def ask(client: openai.OpenAI, extra: Any, **options: Any) -> Any:
    return client.chat.completions.create(messages=CAPITAL, extra_body=extra, **{**GREEDY, **options})


@pytest.mark.parametrize("extra", [THINK, {"chat_template_kwargs": THINK}], ids=["field", "template"])
def test_an_answer_that_only_thinks(client: openai.OpenAI, extra: Any) -> None:
    plain, thinking = ask(client, {}), ask(client, extra)
    message = thinking.choices[0].message
    assert message.reasoning_content and not message.content
    assert thinking.usage.prompt_tokens > plain.usage.prompt_tokens  # the opening marker
    assert getattr(plain.choices[0].message, "reasoning_content", None) is None


def test_it_can_be_said_to_be_off(client: openai.OpenAI) -> None:
    for extra in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert ask(client, extra).choices[0].message.content == "The capital of France is Paris."


def test_a_stream_is_the_whole(client: openai.OpenAI) -> None:
    for extra in (THINK, {}, {**THINK, "thinking_budget": 5}):
        message = ask(client, extra).choices[0].message
        reasoning = content = ""
        for chunk in ask(client, extra, stream=True):
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                content += choice.delta.content or ""
        assert (reasoning, content) == (
            getattr(message, "reasoning_content", None) or "",
            message.content or "",
        )


def test_a_budget_ends_the_reasoning(client: openai.OpenAI) -> None:
    answer = ask(client, {**THINK, "thinking_budget": 4}, max_tokens=30)
    message = answer.choices[0].message
    assert message.content and "think>" not in message.content + message.reasoning_content
    free = ask(client, THINK, max_tokens=30).choices[0].message.reasoning_content
    assert free.startswith(message.reasoning_content) and len(message.reasoning_content) < len(free)
    assert answer.usage.completion_tokens_details.reasoning_tokens >= 4
