"""How answers are taken apart and what requests get by default: settings, then presets, then the template."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from atlas.config import Origin, ServeConfig, flag_name
from atlas.engine.sampling_defaults import Layer, SamplingDefaults
from atlas.errors import BuildError, ConfigError, RequestError
from atlas.parsers import MARKERS, TOOL_FORMATS, Markers, ToolFormat
from atlas.presets import library
from atlas.presets.detection import REASONING_SIGNS, TOOL_SIGNS, Found, Sign, detect
from atlas.presets.library import Parser, Preset
from atlas.targets.tree import kernels_root
from atlas.text.chat_template import ChatTemplate
from atlas.text.switches import RESERVED, THINKING_NAMES, Switches

EFFORT = "reasoning_effort"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`: OpenAI's, and the "max" of others. A template may refuse some."""


class Asked(msgspec.Struct, frozen=True):
    """What a request asks of the chat template.

    variables: names for `ChatTemplate.render`.
    thinks: whether the answer is to reason, which chooses its sampling defaults.
    ignored: fields that this template has no use for, to be reported.
    """

    variables: dict[str, Any]
    thinks: bool
    ignored: list[str]


class Presets(msgspec.Struct, frozen=True):
    """What holds for every chat with a model unless the request says otherwise.

    tool_format: a name of TOOL_FORMATS, or None: no calls are looked for.
    reasoning: a name of MARKERS, or None: nothing in an answer is reasoning.
    enable_thinking: what the server's settings say of the thinking switch; None leaves it to the template.
    switches: what the template can be asked for.
    thinking, plain: sampling of requests whose answer reasons, and of others.
    origins: which preset applies, `tool_parser`, `reasoning_parser` and `enable_thinking`, each with where it came
        from and why.
    """

    tool_format: str | None
    reasoning: str | None
    enable_thinking: bool | None
    switches: Switches
    thinking: SamplingDefaults
    plain: SamplingDefaults
    origins: tuple[Origin, ...]

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        template: ChatTemplate | None,
        settings: ServeConfig,
        origins: Sequence[Origin] = (),
        *,
        own_template: str | None = None,
        presets: Sequence[Preset] | None = None,
    ) -> Presets:
        """The presets of a model.

        config, generation_config: contents of the checkpoint's files.  template: None if there is none that works.
        origins: where each value of `settings` came from.  presets: of known models, instead of the kernel tree's.
        own_template: the checkpoint's, by which it is known; None: `template` is it. What answers look like depends
            on the template in use; which sampling suits the model does not.

        Raises:
            BuildError: a file of presets is wrong.
            ConfigError: a setting asks for what the model's template cannot do.
        """
        told = {origin.name: origin.origin for origin in origins}
        text = template.source if template else ""
        switches = Switches.of(template) if template else Switches()
        known = _known() if presets is None else presets
        architectures = config.get("architectures")
        named = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
        in_use = library.find(known, named, text)
        tools = _parser(settings.tool_parser, told.get("tool_parser"), in_use, "tool_parser", TOOL_SIGNS, text)
        reasons = _parser(
            settings.reasoning_parser, told.get("reasoning_parser"), in_use, "reasoning_parser", REASONING_SIGNS, text
        )
        preset = in_use if own_template is None else library.find(known, named, own_template)
        layers, sampling_preset = _layers(preset, generation_config)
        if settings.default_sampling:
            origin = told.get("default_sampling", "setting")
            layers = [[*of_mode, Layer(settings.default_sampling, origin, "--default-sampling")] for of_mode in layers]
        result = cls(
            tool_format=tools.name,
            reasoning=reasons.name,
            enable_thinking=settings.enable_thinking,
            switches=switches,
            thinking=SamplingDefaults.of_model(generation_config, layers[0]),
            plain=SamplingDefaults.of_model(generation_config, layers[1]),
            origins=(
                Origin("tool_parser", tools.name or "none", tools.reason),
                Origin("reasoning_parser", reasons.name or "none", reasons.reason),
                _thinking(settings.enable_thinking, told, switches),
                sampling_preset,
            ),
        )
        if switches.thinking is None and settings.enable_thinking not in (None, result.without_switch):
            found = f"{str(settings.enable_thinking).lower()}, but the model's chat template has no thinking switch"
            raise ConfigError(flag_name("enable_thinking"), found, fix="leave it out")
        return result

    @property
    def parser(self) -> ToolFormat | None:
        """How the model writes calls."""
        return None if self.tool_format is None else TOOL_FORMATS[self.tool_format]

    @property
    def markers(self) -> Markers | None:
        """Around reasoning."""
        return None if self.reasoning is None else MARKERS[self.reasoning]

    @property
    def thinks(self) -> bool:
        """Whether an answer reasons where the request says nothing of it."""
        if self.switches.thinking is not None and self.enable_thinking is not None:
            return self.enable_thinking
        return self.without_switch

    @property
    def without_switch(self) -> bool:
        """Whether an answer reasons where the template is told nothing of it."""
        if self.switches.thinks is not None:
            return self.switches.thinks
        return self.markers is not None and self.markers.inside(self.switches.prompt)

    def sampling(self, thinks: bool | None = None) -> SamplingDefaults:
        """Defaults of a request whose answer reasons or does not; None: of one that says nothing of it."""
        return self.thinking if (self.thinks if thinks is None else thinks) else self.plain

    def modes(self) -> dict[str, SamplingDefaults]:
        """The sampling of each kind of answer that this model can be asked for: `thinking`, `plain`, or both."""
        modes = {"thinking": self.thinking, "plain": self.plain}
        if self.switches.thinking is None:
            del modes["plain" if self.without_switch else "thinking"]
        return modes

    def sampling_origins(self) -> list[Origin]:
        """The defaults of all modes, for people: once where they agree."""
        result = []
        modes = self.modes()
        for of_modes in zip(*(defaults.origins for defaults in modes.values()), strict=True):
            if len({(origin.value, origin.origin) for origin in of_modes}) == 1:
                result.append(of_modes[0])
            else:
                result += [
                    Origin(f"{o.name}, {mode}", o.value, o.origin) for mode, o in zip(modes, of_modes, strict=True)
                ]
        return result

    def ask(
        self,
        *,
        thinking: tuple[str, bool] | None = None,
        effort: tuple[str, str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Asked:
        """What a request's wishes mean to this model's template.

        thinking, effort: the field that has it, such as `enable_thinking` or `reasoning.effort`, and its value.

        Raises:
            RequestError: naming the field: a value that nothing could take, two that contradict each other, or a wish
                about reasoning that this model cannot fulfil.
        """
        variables: dict[str, Any] = {}
        ignored = []
        wishes: list[tuple[str, bool]] = [] if thinking is None else [thinking]
        for name, value in (chat_template_kwargs or {}).items():
            where = f"chat_template_kwargs.{name[:60]}"
            if name in RESERVED:
                raise RequestError(where, "a name that the server sets", "other names; the request's own fields")
            if name not in self.switches.names:
                ignored.append(where)
                continue
            if name in THINKING_NAMES:
                if not isinstance(value, bool):
                    raise RequestError(where, f"a {type(value).__name__}", "true or false")
                if self.switches.thinking is not None:
                    wishes.append((where, value))
            elif name == EFFORT:
                if not isinstance(value, str):
                    raise RequestError(where, f"a {type(value).__name__}", "a string")
                wishes.append((where, value != "none"))
            variables[name] = value
        graded = EFFORT in self.switches.names
        if effort is not None:
            field, level = effort
            if level not in EFFORTS:
                raise RequestError(field, repr(level)[:40], ", ".join(EFFORTS))
            if graded and variables.setdefault(EFFORT, level) != level:
                found = f"{level}, but chat_template_kwargs.{EFFORT} is {str(variables[EFFORT])[:40]}"
                raise RequestError(field, found, "one of the two")
            if graded or self.switches.thinking is not None or level == "none":
                wishes.append((field, level != "none"))
            else:
                ignored.append(field)
        thinks = self._thinks(wishes, ignored, graded=graded)
        if self.switches.thinking is not None:
            if wishes or self.enable_thinking is not None:
                variables[self.switches.thinking] = thinks
        elif graded and thinking is not None and EFFORT not in variables:
            # The only way to say it to this template; there is no level that says no more than "on".
            if thinks:
                ignored.append(thinking[0])
            else:
                variables[EFFORT] = "none"
        return Asked(variables, thinks, ignored)

    def _thinks(self, wishes: Sequence[tuple[str, bool]], ignored: list[str], *, graded: bool) -> bool:
        if not wishes:
            return self.thinks
        (first, thinks), *others = wishes
        for where, other in others:
            if other != thinks:
                raise RequestError(where, f"reasoning {_on(other)}, but {first} has it {_on(thinks)}", "one of the two")
        if self.switches.thinking is None and not graded:
            if thinks != self.without_switch:
                always = "always reason" if self.without_switch else "never reason"
                found = f"reasoning {_on(thinks)}: this model's answers {always}, its chat template has no switch"
                raise RequestError(first, found, "the field left out")
            ignored += [where for where, _ in wishes]
        return thinks


def _on(thinks: bool) -> str:
    return "on" if thinks else "off"


@functools.cache
def _known() -> tuple[Preset, ...]:
    try:
        root = kernels_root()
    except BuildError:  # nothing of the tree was installed; parsers then come from the template
        return ()
    return tuple(library.read(root))


def _parser(
    setting: str, told: str | None, preset: Preset | None, name: str, signs: Sequence[Sign], template: str
) -> Found:
    """A parser that the settings name, else the preset, else the template.

    Where the template clearly shows another notation than the preset, it is right: someone taught this model that one.
    """
    if setting != "auto":
        return Found(None if setting == "none" else setting, told or "setting")
    if not template:
        return Found(None, "the model has no chat template")
    shown = detect(template, signs, "tool calls" if signs is TOOL_SIGNS else "reasoning")
    parser: Parser | None = getattr(preset, name, None)
    if preset is None or parser is None:
        return shown
    if shown.name is not None and not _alike(shown.name, parser.name):
        return Found(shown.name, f"{shown.reason}, unlike those of preset {preset.name}")
    return Found(
        None if parser.name == "none" else parser.name, f"preset {preset.name}: {parser.reason}; {parser.source}"
    )


def _alike(one: str, other: str) -> bool:
    """Whether two parsers are for the same notation."""
    marks = [(MARKERS[name].start, MARKERS[name].end) if name in MARKERS else name for name in (one, other)]
    return marks[0] == marks[1]


def _layers(preset: Preset | None, generation_config: Mapping[str, Any]) -> tuple[list[list[Layer]], Origin]:
    """Sampling of the preset for answers that reason and for others; and whether it applies, and why."""
    name = "sampling_preset"
    if preset is None:
        return [[], []], Origin(name, None, "none is known for this architecture with this chat template")
    sampling = preset.sampling
    if sampling is None:
        return [[], []], Origin(name, None, f"preset {preset.name} has none")
    if (field := sampling.overruled(generation_config)) is not None:
        found = f"generation_config.json has {field} {generation_config[field]!r}, which is not its makers' value"
        return [[], []], Origin(name, None, f"preset {preset.name} is left aside: {found}")
    file = f"{preset.name}.toml"
    modes = (("thinking", sampling.thinking), ("plain", sampling.plain))
    layers = [[Layer(values, f"preset {preset.name}, {mode}", file)] for mode, values in modes]
    return layers, Origin(name, preset.name, f"{sampling.reason}; {sampling.source}")


def _thinking(setting: bool | None, told: Mapping[str, str], switches: Switches) -> Origin:
    name = "enable_thinking"
    if setting is not None:
        return Origin(name, setting, told.get(name, "setting"))
    if switches.thinking is None:
        return Origin(name, None, "the chat template has no thinking switch")
    return Origin(name, switches.thinks, f"the chat template's own default of {switches.thinking}")
