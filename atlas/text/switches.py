"""What a chat template can be asked for: the names it reads, and what its thinking switch does.

A name that a template does not read changes nothing, so a request that gives one has to be told. The template's text
says which names it reads; what the thinking switch does, and what holds without it, is found by rendering a question
each way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from atlas.errors import RequestError
from atlas.text.chat_template import PROBE_SECONDS, ChatTemplate

THINKING_NAMES = ("enable_thinking", "thinking")
"""What templates call the switch: Qwen3, GLM, Gemma 4, SmolLM3 and others; DeepSeek V3.1, Kimi K2, Granite 3.2."""

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""What `ChatTemplate.render` gives every template itself."""

_QUESTION = ({"role": "user", "content": "Hi"},)


class Switches(msgspec.Struct, frozen=True):
    """names: the variables that a template reads, but for those of `RESERVED` and the special tokens.

    takes_tools: it shows the tools of a request to the model.
    thinking: name of the switch between reasoning and not; None if there is none that changes the prompt.
    thinks: where there is such a switch, what it stands at when it is left out; else None.
    prompt: a rendered question, all switches left out; it shows whether answers begin inside reasoning.
    late_system: it shows messages of the system that stand after those of the user.
    """

    names: frozenset[str] = frozenset()
    takes_tools: bool = False
    thinking: str | None = None
    thinks: bool | None = None
    prompt: str = ""
    late_system: bool = False

    @classmethod
    def of(cls, template: ChatTemplate) -> Switches:
        """Look at a template. Where it refuses a plain question, the name of its switch has to do."""
        names = template.variables - {*RESERVED}
        takes_tools, late_system = "tools" in template.variables, _takes_late_system(template)
        unset = _render(template)
        if unset is None:
            switch = next((name for name in THINKING_NAMES if name in names), None)
            return cls(names, takes_tools, switch, late_system=late_system)
        for name in THINKING_NAMES:
            if name in names:
                on, off = _render(template, {name: True}), _render(template, {name: False})
                if on != off and on is not None and off is not None:
                    # Neither: the template has a third answer for "not said", such as leaving it to the model.
                    thinks = True if unset == on else False if unset == off else None
                    return cls(names, takes_tools, name, thinks, unset, late_system)
        return cls(names, takes_tools, prompt=unset, late_system=late_system)


def _takes_late_system(template: ChatTemplate) -> bool:
    told = "a late word"
    first, (user,) = {"role": "system", "content": "Hello"}, _QUESTION
    late, answer = {"role": "system", "content": told}, {"role": "assistant", "content": "Yes"}
    conversations = ((first, user, late), (user, late), (first, user, late, answer, user))
    return all(told in (_render(template, messages=messages) or "") for messages in conversations)


def _render(
    template: ChatTemplate,
    variables: Mapping[str, Any] | None = None,
    messages: Sequence[Mapping[str, Any]] = _QUESTION,
) -> str | None:
    try:
        return template.render(messages, variables=variables, seconds=PROBE_SECONDS)
    except RequestError:
        return None
