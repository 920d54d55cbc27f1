"""How answers are taken apart and what requests get by default: settings, then presets, then the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from atlas.config import Origin, ServeConfig, flag_name
from atlas.engine.sampling_defaults import Layer, SamplingDefaults
from atlas.errors import ConfigError
from atlas.parsers import MARKERS, TOOL_FORMATS, Markers, ToolFormat
from atlas.presets.detection import REASONING_SIGNS, TOOL_SIGNS, Found, detect
from atlas.text.chat_template import ChatTemplate
from atlas.text.switches import Switches

_NO_TEMPLATE = Found(None, "the model has no chat template")


class Presets(msgspec.Struct, frozen=True):
    """What holds for every chat with a model unless the request says otherwise.

    tool_format: a name of TOOL_FORMATS, or None: no calls are looked for.
    reasoning: a name of MARKERS, or None: nothing in an answer is reasoning.
    enable_thinking: what the server's settings say of the thinking switch; None leaves it to the template.
    switches: what the template can be asked for.
    thinking, plain: sampling of requests whose answer reasons, and of others.
    origins: `tool_parser`, `reasoning_parser` and `enable_thinking`, each with where it came from and why.
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
    ) -> Presets:
        """The presets of a model.

        config, generation_config: contents of the checkpoint's files.  template: None if there is none that works.
        origins: where each value of `settings` came from.

        Raises:
            ConfigError: a setting asks for what the model's template cannot do.
        """
        told = {origin.name: origin.origin for origin in origins}
        text = template.source if template else ""
        switches = Switches.of(template) if template else Switches()
        tools = detect(text, TOOL_SIGNS, "tool calls") if template else _NO_TEMPLATE
        reasons = detect(text, REASONING_SIGNS, "reasoning") if template else _NO_TEMPLATE
        tools = _set("tool_parser", settings.tool_parser, told, tools)
        reasons = _set("reasoning_parser", settings.reasoning_parser, told, reasons)
        layers = []
        if settings.default_sampling:
            origin = told.get("default_sampling", "setting")
            layers.append(Layer(settings.default_sampling, origin, flag_name("default_sampling")))
        sampling = SamplingDefaults.of_model(generation_config, layers)
        presets = cls(
            tool_format=tools.name,
            reasoning=reasons.name,
            enable_thinking=settings.enable_thinking,
            switches=switches,
            thinking=sampling,
            plain=sampling,
            origins=(
                Origin("tool_parser", tools.name or "none", tools.reason),
                Origin("reasoning_parser", reasons.name or "none", reasons.reason),
                _thinking(settings.enable_thinking, told, switches),
            ),
        )
        if switches.thinking is None and settings.enable_thinking not in (None, presets.without_switch):
            found = f"{str(settings.enable_thinking).lower()}, but the model's chat template has no thinking switch"
            raise ConfigError(flag_name("enable_thinking"), found, fix="leave it out")
        return presets

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


def _set(name: str, value: str, told: Mapping[str, str], otherwise: Found) -> Found:
    """A parser that the settings name, or the one found without them."""
    if value == "auto":
        return otherwise
    return Found(None if value == "none" else value, told.get(name, "setting"))


def _thinking(setting: bool | None, told: Mapping[str, str], switches: Switches) -> Origin:
    name = "enable_thinking"
    if setting is not None:
        return Origin(name, setting, told.get(name, "setting"))
    if switches.thinking is None:
        return Origin(name, None, "the chat template has no thinking switch")
    return Origin(name, switches.thinks, f"the chat template's own default of {switches.thinking}")
