"""The presets beside the model facts: well formed, each for its own models, and without effect on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas.errors import BuildError
from atlas.presets import library
from atlas.targets.resolution import facts
from tests.presets import templates as known

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
PRESETS = library.read(KERNELS)

# A model of kernels/models -> templates that its instruction-tuned versions have, and the preset of each.
MODELS = {
    "gemma-3-1b": {known.GEMMA3: "gemma-3"},
    "gemma-3-270m": {known.GEMMA3: "gemma-3"},
    "granite-3.1-2b": {known.chatml(): None},
    "llama-3-8b": {known.LLAMA3: "llama-3", known.R1_DISTILL: "deepseek-r1-distill"},
    "llama-3.2-1b": {known.LLAMA31: "llama-3"},
    "mistral-7b": {known.chatml(known.MISTRAL_CALL): None},
    "phi-3-mini-4k": {known.chatml(): None},
    "qwen2.5-0.5b": {known.QWEN25: "qwen2.5", known.R1_DISTILL: "deepseek-r1-distill"},
    "qwen3-0.6b": {known.QWEN3: "qwen3"},
    "qwen3-8b": {known.QWEN3: "qwen3"},
    "qwen3-30b-a3b": {
        known.QWEN3: "qwen3",
        known.QWEN3_INSTRUCT: "qwen3-instruct",
        known.QWEN3_THINKING: "qwen3-thinking",
        known.chatml(known.XML_CALL): None,  # Qwen3-Coder
    },
    "qwen3-next-80b-a3b": {known.QWEN3_INSTRUCT: "qwen3-instruct", known.QWEN3_THINKING: "qwen3-thinking"},
    "qwen3.5-122b-a10b": {known.QWEN35: "qwen3.5"},
    "qwen3.6-35b-a3b": {known.QWEN36: "qwen3.6"},
    "qwen3.8-27b": {known.QWEN36: "qwen3.6"},
    "smollm2-135m": {known.SMOLLM2: "smollm2"},
    "tiny-hybrid": {known.chatml(): None},
}


def test_every_model_with_facts_is_thought_of() -> None:
    assert MODELS.keys() == facts(KERNELS).keys()
    used = {preset for templates in MODELS.values() for preset in templates.values()}
    assert used - {None} == {preset.name for preset in PRESETS}


@pytest.mark.parametrize("model", MODELS)
def test_the_preset_of_a_model(model: str) -> None:
    architectures = facts(KERNELS)[model]["architectures"]
    for template, name in MODELS[model].items():
        fitting = [preset.name for preset in PRESETS if preset.match.holds(architectures, template)]
        assert fitting == ([] if name is None else [name])
        found = library.find(PRESETS, architectures, template)
        assert (found.name if found else None) == name


def test_no_preset_without_its_template_or_architecture() -> None:
    for preset in PRESETS:
        assert library.find(PRESETS, preset.match.architectures, "") is None
        assert library.find(PRESETS, ["OtherForCausalLM"], "".join(preset.match.template)) is None
        assert all(a.endswith(("ForCausalLM", "ForConditionalGeneration")) for a in preset.match.architectures)


def test_every_value_says_why_and_where() -> None:
    for preset in PRESETS:
        parts = [part for part in (preset.tool_parser, preset.reasoning_parser, preset.sampling) if part is not None]
        assert parts
        for part in parts:
            assert len(part.reason) > 20
            assert part.source.startswith("https://huggingface.co/")
        if preset.sampling is not None:
            assert preset.sampling.thinking or preset.sampling.plain


def test_another_value_in_generation_config_is_its_owners_choice() -> None:
    (qwen3,) = (preset for preset in PRESETS if preset.name == "qwen3")
    assert qwen3.sampling is not None
    published = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]}
    overruled = qwen3.sampling.overruled
    assert overruled({}) is None
    assert overruled(published) is None
    assert overruled({**published, "top_k": 20.0}) is None
    assert overruled({**published, "temperature": 0.3}) == "temperature"
    assert overruled({**published, "temperature": 0.7}) is None  # the makers' for the other mode
    assert overruled({**published, "min_p": 0.05}) == "min_p"
    assert overruled({**published, "repetition_penalty": 1.1}) is None  # which the preset says nothing of
    assert overruled({**published, "temperature": "hot"}) is None


def test_several_published_values() -> None:
    (qwen35,) = (preset for preset in PRESETS if preset.name == "qwen3.5")
    assert qwen35.sampling is not None
    for temperature, field in ((0.6, None), (1.0, None), (0.7, None), (0.5, "temperature")):
        assert qwen35.sampling.overruled({"temperature": temperature}) == field


GOOD = """
[match]
architectures = ["LlamaForCausalLM"]
template = ["x"]
[tool_parser]
name = "hermes"
reason = "r"
source = "s"
[sampling]
reason = "r"
source = "s"
plain = { temperature = 0.5 }
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"hermes"', '"hermez"', ["no parser is called 'hermez'", "nearest: hermes", "qwen3_coder"]),
        ("temperature = 0.5", "temperature = -1", ["temperature = -1", "temperature 0 to 100"]),
        ("temperature = 0.5", "top_k = 1.5", ["top_k = 1.5"]),
        ("temperature = 0.5", "heat = 1", ["heat = 1", "top_p"]),
        ("plain = {", "published = { top_p = [0.9, 2] }\nplain = {", ["top_p = 2"]),
        ('reason = "r"\nsource = "s"\nplain', 'source = "s"\nplain', ["`reason`", "$.sampling"]),
        ("[match]", "[matches]", ["matches"]),
        ("architectures", "architecture", ["architecture"]),
        ("{ temperature", "{{ temperature", ["line"]),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    folder = tmp_path / library.FOLDER
    folder.mkdir(parents=True)
    (folder / "good.toml").write_text(GOOD)
    assert [preset.name for preset in library.read(tmp_path)] == ["good"]
    assert old in GOOD
    (folder / "wrong.toml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BuildError) as error:
        library.read(tmp_path)
    for word in ["wrong.toml", *words]:
        assert word in str(error.value)
