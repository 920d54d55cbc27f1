"""Chat templates: what they may use, what they may not, and that the limits hold."""

from __future__ import annotations

import resource
import time
from typing import Any

import msgspec
import pytest

from atlas.errors import CheckpointError, RequestError
from atlas.text.chat_template import CallStyle, ChatTemplate
from atlas.text.messages import ChatMessage, turns

MESSAGES = [{"role": "user", "content": "yo"}, {"role": "assistant", "content": "é<"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, seconds: float = 0.5) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, seconds=seconds)
    return template.render(MESSAGES if messages is None else messages)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>yo"),
        ("{{ messages[1].content | tojson }}", '"é<"'),
        ("{{ messages | tojson(indent=1) | length > 10 }}", "True"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
            "assistant",
        ),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ';' if not loop.last }}{% endfor %}",
            "1/2;2/2",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "yo"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ 'a' ~ 1 ~ none }}{{ '%s-%s' | format('a', 'b') }}{{ '{}{x}'.format(1, x=2) }}", "a1Nonea-b12"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user, assistant"),
        ("{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content) }}", "[yo]"),
        ("{{ 'a,b'.split(',')[-1] }}{{ 'abc'.replace('b', 'x') }}{{ ' a '.strip() }}", "baxca"),
        ("{{ messages[::-1][0].role }}", "assistant"),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source) == expected


LIMITED = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(10000000000) %}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ [1] * 10**9 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(10000) %}{% set ns.l = ns.l + ['x' * 30000000] %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a' | indent(1000000000, true) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ range(100000) | list | join('x' * 100000) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% set s = 'x' * 30000000 %}{% set y %}{% for i in range(100000) %}{{ s }}{% endfor %}{% endset %}{{ y }}",
    "{% for i in range(100000) %}" + "x" * 10000 + "{% endfor %}",
    "{% set x %}{% for i in range(100000) %}" + "x" * 100000 + "{% endfor %}{% endset %}{{ x }}",
]


@pytest.mark.parametrize("source", LIMITED)
def test_limits_hold(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(RequestError, match="chat template failed"):
        render(source)
    assert time.monotonic() - began < 2.5
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 1500


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'x': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ lipsum() }}",
        "{% include 'x' %}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_nothing_to_reach(source: str) -> None:
    try:
        text = render(source)
    except RequestError:
        return
    assert text == ""  # an undefined value


def test_raise_exception_keeps_the_templates_own_words() -> None:
    with pytest.raises(RequestError, match="refused by the model's chat template: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(CheckpointError, match="chat template, line 2"):
        ChatTemplate("a\n{% if %}", {})


def test_an_unknown_filter_is_told_when_the_template_is_read() -> None:
    with pytest.raises(CheckpointError, match="urlize"):
        ChatTemplate("{{ 'a' | urlize }}", {})


def test_a_large_conversation_fits_the_limits() -> None:
    messages = [{"role": "user", "content": "word " * 2000} for _ in range(300)]
    source = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '\n' }}{% endfor %}"
    assert len(render(source, messages, seconds=5)) > 2_900_000


@pytest.mark.parametrize(
    ("call", "style"),
    [
        # Qwen, Llama and most others
        ("{{ c.function.arguments | tojson }}", CallStyle()),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", CallStyle()),
        # DeepSeek-R1 puts texts together
        ("{{ 'x' + c.function.arguments }}", CallStyle(text_arguments=True)),
        # and shows calls only where there is no content
        ("{% if m.content is none %}{{ c.function.arguments }}{% endif %}", CallStyle(null_content=True)),
        (
            "{% if m.content is none %}{{ 'x' + c.function.arguments }}{% endif %}",
            CallStyle(null_content=True, text_arguments=True),
        ),
        ("{{ raise_exception('no calls here') }}", CallStyle()),
        ("", CallStyle()),
    ],
)
def test_calls_of_the_history_reach_the_prompt(call: str, style: CallStyle) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        + call
        + "{% endfor %}"
        "{% endfor %}",
        {},
    )
    assert template.call_style == style
    said: Any = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"place": "Zürich"}'}}]}
    for content in ({}, {"content": None}, {"content": ""}):
        history = msgspec.convert([{"role": "user", "content": "Hi"}, {**said, **content}], list[ChatMessage])
        if call and "raise" not in call:
            assert "Zürich" in template.render(turns(history, str, template))
    # Text beside a call stays.
    history = msgspec.convert([{**said, "content": "let me see"}], list[ChatMessage])
    assert turns(history, str, template)[0]["content"] == "let me see"
