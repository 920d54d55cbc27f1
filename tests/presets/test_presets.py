"""Defaults of a model: which of four sources decides, what is said of it, and what a request asks of the template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.config import ReasoningParser, ServeConfig, ToolParser, load
from atlas.errors import ConfigError, RequestError
from atlas.parsers import MARKERS, TOOL_FORMATS
from atlas.presets import EFFORT, EFFORTS, Asked, Presets
from atlas.text.chat_template import ChatTemplate
from tests.presets import templates as known

QWEN3: Any = {"architectures": ["Qwen3ForCausalLM"]}
OTHER: Any = {"architectures": ["LlamaForCausalLM"]}
PUBLISHED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def presets(template: str | None, *flags: str, config: Any = OTHER, generation_config: Any = None) -> Presets:
    loaded = load(flags)
    chat_template = None if template is None else ChatTemplate(template, {})
    return Presets.of(config, generation_config or {}, chat_template, loaded.config, loaded.origins)


def ask(of: Presets, fields: dict[str, Any]) -> Asked:
    """`fields` as a request has them."""
    names = {"enable_thinking": "thinking", "reasoning_effort": "effort"}
    return of.ask(
        **{names.get(name, name): (name, value) if name in names else value for name, value in fields.items()}
    )


def told(of: Presets) -> dict[str, tuple[Any, str]]:
    return {origin.name: (origin.value, origin.origin) for origin in (*of.origins, *of.sampling_origins())}


def test_flag_then_preset_then_template_then_none() -> None:
    auto = presets(known.QWEN3, config=QWEN3)
    assert (auto.tool_format, auto.reasoning) == ("hermes", "think")
    assert told(auto)["tool_parser"][1].startswith("preset qwen3: ")
    assert auto.parser is TOOL_FORMATS["hermes"] and auto.markers is MARKERS["think"]
    detected = presets(known.QWEN3)
    assert (detected.tool_format, detected.reasoning) == ("hermes", "think")
    assert told(detected)["tool_parser"][1].startswith("the chat template: calls are JSON")
    flags = presets(known.QWEN3, "--tool-parser", "glm", "--reasoning-parser", "none", config=QWEN3)
    assert (flags.tool_format, flags.reasoning) == ("glm", None)
    assert told(flags)["tool_parser"] == ("glm", "flag") and told(flags)["reasoning_parser"] == ("none", "flag")
    assert flags.markers is None
    off = presets(known.QWEN3, "--tool-parser", "none", config=QWEN3)
    assert off.tool_format is None and off.parser is None
    plain = presets(known.chatml())
    assert (plain.tool_format, plain.reasoning) == (None, None)
    assert told(plain)["tool_parser"] == ("none", "the chat template shows no tool calls that Atlas knows")
    assert told(presets(None))["tool_parser"] == ("none", "the model has no chat template")
    # A preset's "none" is a decision: no look at the template after it.
    assert told(presets(known.GEMMA3, config={"architectures": ["Gemma3ForCausalLM"]}))["tool_parser"][1].startswith(
        "preset gemma-3: "
    )


def test_a_template_of_ones_own_leaves_the_model_what_it_is() -> None:
    def served(text: str, own: str | None) -> Presets:
        given = ServeConfig(chat_template="a file")
        return Presets.of(QWEN3, PUBLISHED, ChatTemplate(text, {}), given, own_template=own)

    plain = served(known.chatml(), known.QWEN3)
    assert told(plain)["sampling_preset"][0] == "qwen3" and plain.plain.temperature == 0.7
    assert (plain.tool_format, plain.reasoning, plain.switches.thinking) == (None, None, None)
    taught = served(known.chatml(known.GLM_CALL), known.QWEN3)
    assert taught.tool_format == "glm" and told(taught)["tool_parser"][1].startswith("the chat template: ")
    assert told(served(known.QWEN3, known.chatml()))["sampling_preset"][0] is None, (
        "another model, whatever it is given"
    )
    assert told(served(known.QWEN3, None))["sampling_preset"][0] == "qwen3"


def test_a_template_that_shows_another_notation_is_right() -> None:
    taught = presets(known.chatml(known.HERMES_CALL + known.MISTRAL_CALL, "{# enable_thinking #}"), config=QWEN3)
    assert taught.tool_format == "hermes", "the template shows two, so the preset decides"
    other = presets(known.QWEN3.replace(known.HERMES_CALL, known.GLM_CALL), config=QWEN3)
    assert other.tool_format == "glm" and "unlike those of preset qwen3" in told(other)["tool_parser"][1]
    gemma = {"architectures": ["Gemma3ForCausalLM"]}
    tuned = presets(known.GEMMA3 + "{{ tools }}" + "{# </think> #}" + known.HERMES_CALL, config=gemma)
    assert (tuned.tool_format, tuned.reasoning) == ("hermes", "think")
    # What the preset says of the same notation stays.
    assert presets(known.R1_DISTILL).reasoning == "deepseek_r1"
    flag = presets(known.QWEN3.replace(known.HERMES_CALL, known.GLM_CALL), "--tool-parser", "hermes", config=QWEN3)
    assert flag.tool_format == "hermes"


def test_the_flags_know_every_parser() -> None:
    assert set(ToolParser.__args__) == {"auto", "none", *TOOL_FORMATS}
    assert set(ReasoningParser.__args__) == {"auto", "none", *MARKERS}


def test_sampling_generation_config_then_preset_then_flags() -> None:
    bare = presets(known.chatml(), generation_config={"temperature": 0.3})
    assert told(bare)["temperature"] == (0.3, "model default (generation_config.json)")
    assert told(bare)["top_p"] == (1.0, "built-in (OpenAI's)")
    qwen = presets(known.QWEN3, config=QWEN3, generation_config=PUBLISHED)
    assert (qwen.thinking.temperature, qwen.thinking.top_p) == (0.6, 0.95)
    assert (qwen.plain.temperature, qwen.plain.top_p, qwen.plain.top_k) == (0.7, 0.8, 20)
    assert told(qwen)["temperature, plain"] == (0.7, "preset qwen3, plain")
    assert told(qwen)["temperature, thinking"] == (0.6, "preset qwen3, thinking")
    assert told(qwen)["sampling_preset"][0] == "qwen3"
    flag = presets(
        known.QWEN3, "--default-sampling", '{"temperature": 0, "top_k": 5}', config=QWEN3, generation_config=PUBLISHED
    )
    assert told(flag)["temperature"] == (0.0, "flag") and told(flag)["top_k"] == (5, "flag")
    assert (flag.thinking.top_p, flag.plain.top_p) == (0.95, 0.8)
    own = presets(known.QWEN3, config=QWEN3, generation_config={**PUBLISHED, "temperature": 0.2})
    assert own.thinking.temperature == own.plain.temperature == 0.2 and own.plain.top_p == 0.95
    assert "generation_config.json has temperature 0.2" in told(own)["sampling_preset"][1]


def test_what_is_out_of_range_is_passed_over_and_told() -> None:
    found = told(presets(known.chatml(), generation_config={"top_p": 1.5, "top_k": 2.5, "min_p": float("nan")}))
    for name, value in (("top_p", "1.5"), ("top_k", "2.5"), ("min_p", "nan")):
        assert f"generation_config.json has {value}, which is out of range" in found[name][1]
    assert (found["top_p"][0], found["top_k"][0], found["min_p"][0]) == (1.0, 0, 0.0)


def test_only_modes_that_the_model_has() -> None:
    assert presets(known.QWEN3).modes().keys() == {"thinking", "plain"}
    assert presets(known.QWEN3_INSTRUCT).modes().keys() == {"plain"}
    assert presets(known.QWEN3_THINKING).modes().keys() == {"thinking"}
    always = presets(known.QWEN3_THINKING, config=QWEN3)
    assert always.thinks and always.sampling().temperature == 0.6


def test_the_flag_of_the_thinking_switch() -> None:
    assert presets(known.QWEN3).thinks and not presets(known.DEEPSEEK_V31).thinks
    off = presets(known.QWEN3, "--no-enable-thinking", config=QWEN3)
    assert not off.thinks and off.sampling().temperature == 0.7
    assert told(off)["enable_thinking"] == (False, "flag")
    assert off.ask() == Asked({"enable_thinking": False}, False, [])
    assert off.ask(thinking=("enable_thinking", True)) == Asked({"enable_thinking": True}, True, [])
    on = presets(known.DEEPSEEK_V31, "--enable-thinking")
    assert on.ask() == Asked({"thinking": True}, True, [])
    assert presets(known.chatml(), "--no-enable-thinking").thinks is False
    for template, flag in ((known.chatml(), "--enable-thinking"), (known.QWEN3_THINKING, "--no-enable-thinking")):
        with pytest.raises(ConfigError, match="--enable-thinking: .* no thinking switch"):
            presets(template, flag)


@pytest.mark.parametrize(
    ("template", "fields", "asked"),
    [
        (known.QWEN3, {}, Asked({}, True, [])),
        (known.QWEN3, {"enable_thinking": False}, Asked({"enable_thinking": False}, False, [])),
        (
            known.QWEN3,
            {"chat_template_kwargs": {"enable_thinking": False}},
            Asked({"enable_thinking": False}, False, []),
        ),
        (known.QWEN3, {"reasoning_effort": "none"}, Asked({"enable_thinking": False}, False, [])),
        (known.QWEN3, {"reasoning_effort": "low"}, Asked({"enable_thinking": True}, True, [])),
        (
            known.QWEN3,
            {"enable_thinking": False, "reasoning_effort": "none"},
            Asked({"enable_thinking": False}, False, []),
        ),
        # The request's word for it; the template's name of it.
        (known.DEEPSEEK_V31, {"enable_thinking": True}, Asked({"thinking": True}, True, [])),
        (known.DEEPSEEK_V31, {"chat_template_kwargs": {"thinking": True}}, Asked({"thinking": True}, True, [])),
        # Another template's name of it says nothing here.
        (
            known.DEEPSEEK_V31,
            {"chat_template_kwargs": {"enable_thinking": True}},
            Asked({}, False, ["chat_template_kwargs.enable_thinking"]),
        ),
        (
            known.QWEN36,
            {"chat_template_kwargs": {"preserve_thinking": [1], "x": 1}},
            Asked({"preserve_thinking": [1]}, True, ["chat_template_kwargs.x"]),
        ),
        # No switch: what holds anyway is reported, for nothing reads it.
        (known.QWEN3_INSTRUCT, {"enable_thinking": False}, Asked({}, False, ["enable_thinking"])),
        (known.QWEN3_THINKING, {"enable_thinking": True}, Asked({}, True, ["enable_thinking"])),
        (known.QWEN3_INSTRUCT, {"reasoning_effort": "none"}, Asked({}, False, ["reasoning_effort"])),
        (known.QWEN3_INSTRUCT, {"reasoning_effort": "high"}, Asked({}, False, ["reasoning_effort"])),
        (
            known.QWEN3_INSTRUCT,
            {"chat_template_kwargs": {"enable_thinking": False}},
            Asked({}, False, ["chat_template_kwargs.enable_thinking"]),
        ),
        # A template with levels of effort and no switch.
        (
            known.chatml() + "{{ reasoning_effort }}",
            {"reasoning_effort": "high"},
            Asked({"reasoning_effort": "high"}, True, []),
        ),
        (
            known.chatml() + "{{ reasoning_effort }}",
            {"enable_thinking": False},
            Asked({"reasoning_effort": "none"}, False, []),
        ),
        (known.chatml() + "{{ reasoning_effort }}", {"enable_thinking": True}, Asked({}, True, ["enable_thinking"])),
    ],
)
def test_what_a_request_asks_of_the_template(template: str, fields: Any, asked: Asked) -> None:
    found = ask(presets(template), fields)
    assert found == asked
    # What is passed on changes the prompt, or at least is read; what is reported does neither.
    chat_template = ChatTemplate(template, {})
    turn: Any = [{"role": "user", "content": "Hi"}]
    rest = {name.split(".")[-1]: "x" for name in found.ignored}
    assert chat_template.render(turn, variables={**found.variables, **rest}) == chat_template.render(
        turn, variables=found.variables
    )
    assert found.variables.keys() <= chat_template.variables


@pytest.mark.parametrize(
    ("template", "fields", "where", "words"),
    [
        (known.QWEN3_INSTRUCT, {"enable_thinking": True}, "enable_thinking", ["never reason", "no switch"]),
        (known.QWEN3_THINKING, {"enable_thinking": False}, "enable_thinking", ["always reason", "no switch"]),
        (known.QWEN3_THINKING, {"reasoning_effort": "none"}, "reasoning_effort", ["always reason"]),
        (
            known.QWEN3,
            {"enable_thinking": True, "reasoning_effort": "none"},
            "reasoning_effort",
            ["off", "enable_thinking has it on"],
        ),
        (
            known.QWEN3,
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
            ["off", "has it on"],
        ),
        (
            known.QWEN3,
            {"chat_template_kwargs": {"enable_thinking": "false"}},
            "chat_template_kwargs.enable_thinking",
            ["str", "true or false"],
        ),
        (known.QWEN3, {"reasoning_effort": "lots"}, "reasoning_effort", ["'lots'", "medium"]),
        (known.QWEN3, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", ["server sets"]),
        (known.QWEN3, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", ["server sets"]),
    ],
)
def test_wishes_that_cannot_be_fulfilled_are_refused(template: str, fields: Any, where: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        ask(presets(template), fields)
    assert error.value.where == where
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("architectures", [None, 5, "Qwen3ForCausalLM", [{}], [["Qwen3ForCausalLM"]], {"a": 1}])
def test_a_config_of_other_types_has_no_preset(architectures: Any) -> None:
    found = presets(known.QWEN3, config={"architectures": architectures})
    assert told(found)["sampling_preset"][0] is None


def test_settings_without_origins() -> None:
    found = Presets.of(OTHER, {}, None, ServeConfig(tool_parser="glm", default_sampling={"min_p": 0.1}))
    assert found.tool_format == "glm" and found.plain.min_p == 0.1
    assert told(found)["tool_parser"] == ("glm", "setting") and told(found)["min_p"] == (0.1, "setting")


def test_a_model_that_always_reasons_though_its_template_does_not_say_so() -> None:
    found = presets(known.R1_DISTILL, config=OTHER)
    assert (found.reasoning, found.thinks) == ("deepseek_r1", True)
    assert found.modes().keys() == {"thinking"} and found.sampling().temperature == 0.6
    with pytest.raises(RequestError, match="always reason"):
        found.ask(thinking=("enable_thinking", False))


TEMPLATES = {
    name: presets(template)
    for name, template in {
        "switch": known.QWEN3,
        "another name": known.DEEPSEEK_V31,
        "more names": known.QWEN36,
        "never": known.QWEN3_INSTRUCT,
        "always": known.QWEN3_THINKING,
        "levels": known.chatml() + "{{ reasoning_effort }}",
        "both": known.QWEN3 + "{{ reasoning_effort }}",
    }.items()
}
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.sampled_from(["none", "high", "x"]), st.lists(st.none()))
KWARGS = st.dictionaries(st.sampled_from(["enable_thinking", "thinking", EFFORT, "preserve_thinking", "x", ""]), VALUES)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(TEMPLATES)), st.none() | st.booleans(), st.none() | st.sampled_from((*EFFORTS, "y")), KWARGS
)
def test_no_wish_is_dropped(name: str, thinking: bool | None, effort: str | None, kwargs: dict[str, Any]) -> None:
    """Each is passed on, or reported, or refused."""
    model = TEMPLATES[name]
    try:
        asked = model.ask(
            thinking=None if thinking is None else ("t", thinking),
            effort=None if effort is None else ("e", effort),
            chat_template_kwargs=kwargs,
        )
    except RequestError as error:
        assert error.where in ("t", "e") or error.where.startswith("chat_template_kwargs.")
        assert error.found and error.accepted
        return
    for field, value in kwargs.items():
        passed = field in asked.variables and asked.variables[field] == value
        assert passed is (f"chat_template_kwargs.{field}" not in asked.ignored)
    switch = model.switches.thinking
    if thinking is not None:
        told = asked.variables.get(switch) is thinking if switch else asked.variables.get(EFFORT) is not None
        assert told is ("t" not in asked.ignored) and asked.thinks is thinking
    if effort is not None:
        told = asked.variables.get(EFFORT) == effort or (switch is not None and switch in asked.variables)
        assert told is ("e" not in asked.ignored)
    assert asked.variables.keys() <= {*model.switches.names}
