"""Presets of known models, `kernels/models/presets/*.toml`: what the makers of a model say suits it.

A file is for a model as its makers published it, with all its sizes and quantisations. It is told from others by its
architecture and its chat template; a fine-tune with another template is another model.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atlas.engine.sampling_defaults import RANGES, accepts
from atlas.errors import BuildError
from atlas.parsers import MARKERS, TOOL_FORMATS

FOLDER = "models/presets"


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which checkpoints a preset is for: all that is given must hold.

    architectures: as in config.json; the checkpoint has one of them.
    template: texts that the chat template holds.  template_lacks: texts that it does not.
    """

    architectures: tuple[str, ...]
    template: tuple[str, ...]
    template_lacks: tuple[str, ...] = ()

    def holds(self, architectures: Sequence[str], template: str) -> bool:
        """Whether a checkpoint is meant."""
        return (
            not {*self.architectures}.isdisjoint(architectures)
            and all(text in template for text in self.template)
            and not any(text in template for text in self.template_lacks)
        )


class Parser(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parser by its name, or "none"; why it is the right one; where that is written."""

    name: str
    reason: str
    source: str


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What requests get that leave it out, by whether the answer reasons; why, and where that is written.

    published: what generation_config.json has in the makers' own checkpoints: a value, or several where they differ or
        are not known for certain. Another value there, which is none of the preset's own either, was chosen by whoever
        made the checkpoint at hand, and is left alone: the preset's sampling is then not applied.
    """

    reason: str
    source: str
    thinking: Mapping[str, float] = {}
    plain: Mapping[str, float] = {}
    published: Mapping[str, float | tuple[float, ...]] = {}

    def overruled(self, generation_config: Mapping[str, Any]) -> str | None:
        """The field of a checkpoint's generation_config.json that says something else than the published one."""
        for name in {**self.published, **self.thinking, **self.plain}:
            value = generation_config.get(name)
            own = (self.thinking.get(name), self.plain.get(name), *several(self.published.get(name)))
            if value is not None and accepts(name, value) and value not in own:
                return name
        return None


def several(value: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """One value of `published`, or several."""
    return value if isinstance(value, tuple) else () if value is None else (value,)


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file. What it leaves out comes from elsewhere: the chat template, generation_config.json."""

    match: Match
    tool_parser: Parser | None = None
    reasoning_parser: Parser | None = None
    sampling: Sampling | None = None
    name: str = ""


def read(root: Path) -> list[Preset]:
    """All presets of a kernel tree. Raises BuildError naming the file and what is wrong in it."""
    return [_read(file) for file in sorted((root / FOLDER).glob("*.toml"))]


def find(presets: Sequence[Preset], architectures: Sequence[str], template: str) -> Preset | None:
    """The one that a checkpoint fits; none where several do, for then none of them says what tells it from others."""
    fitting = [preset for preset in presets if preset.match.holds(architectures, template)]
    return fitting[0] if len(fitting) == 1 else None


def _read(file: Path) -> Preset:
    try:
        preset = msgspec.toml.decode(file.read_bytes(), type=Preset)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BuildError(str(file), str(error), "a preset as docs/defaults.md describes it") from None
    for parser, names in ((preset.tool_parser, TOOL_FORMATS), (preset.reasoning_parser, MARKERS)):
        if parser is not None and parser.name not in (*names, "none"):
            near = difflib.get_close_matches(parser.name, names)
            fix = f"nearest: {near[0]}" if near else ""
            raise BuildError(str(file), f"no parser is called {parser.name!r}", ", ".join((*names, "none")), fix)
    if preset.sampling is not None:
        sampling = preset.sampling
        pairs = [*sampling.thinking.items(), *sampling.plain.items()]
        pairs += [(name, value) for name, given in sampling.published.items() for value in several(given)]
        for name, value in pairs:
            if name not in RANGES or not accepts(name, value):
                known = ", ".join(f"{field} {low:g} to {high:g}" for field, (low, high) in RANGES.items())
                raise BuildError(str(file), f"{name} = {value!r}", known)
    return msgspec.structs.replace(preset, name=file.stem)
