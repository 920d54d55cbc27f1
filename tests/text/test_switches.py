"""What a chat template can be asked for, against what Jinja renders."""

from __future__ import annotations

import time

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.text import chat_template
from atlas.text import switches as switches_of
from atlas.text.chat_template import CallStyle, ChatTemplate
from atlas.text.switches import Switches
from atlas.text.template_names import outside_names
from tests.presets import templates as known

ENVIRONMENT = jinja2.Environment(extensions=["jinja2.ext.do"])


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{% if not x is defined %}{% set x = 1 %}{% endif %}{{ x }}", {"x"}),
        ("{% set x = x | default(1) %}{{ x }}", {"x"}),
        ("{% if a %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}", {"a"}),
        ("{% if a %}{% set x = 1 %}{% elif b %}{% set x = 3 %}{% endif %}{{ x }}", {"a", "b", "x"}),
        ("{% for x in y %}{% set z = x %}{{ z }}{% endfor %}", {"y"}),
        ("{% for x in y %}{% if loop.first %}{% set z = x %}{% endif %}{% endfor %}{{ z }}", {"y", "z"}),
        ("{% macro f(x, n=k) %}{{ x }}{{ n }}{{ g }}{% endmacro %}{{ f(1) }}{{ x }}", {"k", "g", "x"}),
        ("{% set x %}{{ y }}{% endset %}{{ x }}", {"y"}),
        ("{% set ns = namespace(a=b) %}{% set ns.a = c %}{{ ns.a }}", {"b", "c"}),
        ("{% for x in y %}{% else %}{{ x }}{% endfor %}", {"x", "y"}),
        ("{% set a, b = c %}{{ a }}{{ b }}", {"c"}),
        ("{{ range(3) }}", set()),
    ],
)
def test_names_from_outside(source: str, names: set[str]) -> None:
    assert outside_names(ENVIRONMENT.parse(source)) == names


NAMES = st.sampled_from("ab")
EXPRESSIONS = st.one_of(
    NAMES,
    st.sampled_from(["1", "0"]),
    st.builds("({} | default({}))".format, NAMES, NAMES),
    st.builds("({} is defined)".format, NAMES),
)
LEAVES = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds("{{% set {} = {} %}}".format, NAMES, EXPRESSIONS),
)


def block(statements: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(statements, min_size=1, max_size=3).map("".join)


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        LEAVES,
        st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, EXPRESSIONS, inner, inner),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for {} in [1, 2] %}}{}{{% endfor %}}".format, NAMES, inner),
        st.builds("{{% set {} %}}{}{{% endset %}}".format, NAMES, inner),
        st.builds("{{% macro m({}) %}}{}{{% endmacro %}}{{{{ m({}) }}}}".format, NAMES, inner, EXPRESSIONS),
    )


STATEMENTS = block(nested(block(nested(block(LEAVES)))))


@settings(max_examples=150, deadline=None)
@given(STATEMENTS, NAMES, st.sets(NAMES))
def test_what_changes_the_text_is_a_name_from_outside(source: str, name: str, others: set[str]) -> None:
    template = ENVIRONMENT.from_string(source)
    given_names = dict.fromkeys(others - {name}, "o")
    if template.render(given_names) != template.render({**given_names, name: "N"}):
        assert name in outside_names(ENVIRONMENT.parse(source))


def switches(source: str) -> Switches:
    return Switches.of(ChatTemplate(source, {"bos_token": "<s>"}))


@pytest.mark.parametrize(
    ("source", "thinking", "thinks"),
    [
        (known.QWEN3, "enable_thinking", True),
        (known.QWEN35, "enable_thinking", True),
        (known.DEEPSEEK_V31, "thinking", False),
        (known.QWEN3_INSTRUCT, None, None),
        (known.QWEN3_THINKING, None, None),
        # Read, but without an effect.
        ("{% if enable_thinking %}{% endif %}" + known.chatml(), None, None),
        # Neither what true gives nor what false gives.
        ("{{ 'on' if thinking else 'off' if thinking is defined else 'either' }}", "thinking", None),
    ],
)
def test_the_thinking_switch_is_found_by_its_effect(source: str, thinking: str | None, thinks: bool | None) -> None:
    found = switches(source)
    assert (found.thinking, found.thinks) == (thinking, thinks)
    assert found.takes_tools == ("tools" in source)


def test_a_template_that_refuses_the_question_keeps_its_switch() -> None:
    found = switches("{{ raise_exception('no') }}{% if enable_thinking %}x{% endif %}")
    assert (found.thinking, found.thinks, found.prompt) == ("enable_thinking", None, "")


def test_names_of_the_server_and_special_tokens_are_no_switches() -> None:
    found = switches("{{ bos_token }}{{ messages }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ effort }}")
    assert found.names == {"effort"}


def test_a_template_that_never_ends_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat_template.PROBE_SECONDS == switches_of.PROBE_SECONDS <= chat_template.RENDER_SECONDS / 5
    for module in (chat_template, switches_of):
        monkeypatch.setattr(module, "PROBE_SECONDS", 0.1)
    source = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{{ enable_thinking }}"
    started = time.perf_counter()
    template = ChatTemplate(source, {})
    assert switches(source).thinking == "enable_thinking" and template.call_style == CallStyle()
    assert time.perf_counter() - started < 4
