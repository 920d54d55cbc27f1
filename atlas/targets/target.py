"""Targets: which (hardware, model, quant) to build, and which file serves an op in each.

Selection reads `ATLAS_TARGET_HW`, `ATLAS_TARGET_MODEL` and `ATLAS_TARGET_QUANT`; resolution walks the
kernel tree. There is no registration list: a directory or file that exists is found.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atlas.errors import BuildError
from atlas.targets import driver
from atlas.targets.hardware import Hardware, walk

ANY_MODEL = "*"
"""Model of a target whose kernels take run-time dims: one target per quant serves every model."""

_SUFFIXES = {"cpu": ".cpp", "cuda": ".cu"}


@dataclasses.dataclass(frozen=True)
class Target:
    """(hardware, model, quant). facts: the model's config.json fields; empty for ANY_MODEL."""

    hardware: Hardware
    model: str
    quant: str
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.hardware.name}/{self.model}/{self.quant}"


@dataclasses.dataclass(frozen=True)
class Selection:
    """Targets to build, and remarks for the user (why a GPU was or was not chosen)."""

    targets: tuple[Target, ...]
    notes: tuple[str, ...]

    def needs_cuda(self) -> bool:
        return any(target.hardware.kind == "cuda" for target in self.targets)


def models(root: Path) -> dict[str, dict[str, Any]]:
    """Public model facts: `kernels/models/<model>.json`, by model name."""
    result = {}
    for file in sorted((root / "models").glob("*.json")):
        try:
            result[file.stem] = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise BuildError(str(file), f"not valid JSON: {error}") from None
    return result


def select(root: Path, environment: Mapping[str, str]) -> Selection:
    """The targets that the environment asks for; `cpu` always among them.

    Each variable is a name, a comma list or `*` patterns. MODEL and QUANT default to `*`, HW to
    `native`: the directory that matches this machine's GPU, plus `cpu`.

    Raises:
        BuildError: an unknown name (with the nearest ones), or a combination that matches nothing.
    """
    hardware = walk(root)
    facts = models(root)
    concrete = {name: h for name, h in hardware.items() if not h.abstract}
    quants = sorted({quant for h in concrete.values() for quant in h.quants})
    requested = environment.get("ATLAS_TARGET_HW") or "native"
    notes: list[str] = []
    if requested == "native":
        names, note = _native(concrete)
        notes.append(note)
    else:
        names = _match("ATLAS_TARGET_HW", requested, concrete)
    model_text = environment.get("ATLAS_TARGET_MODEL") or "*"
    quant_text = environment.get("ATLAS_TARGET_QUANT") or "*"
    wanted_models = _match("ATLAS_TARGET_MODEL", model_text, facts)
    wanted_quants = _match("ATLAS_TARGET_QUANT", quant_text, quants)

    targets = [Target(hardware["cpu"], ANY_MODEL, quant, {}) for quant in hardware["cpu"].quants]
    for name in names:
        if hardware[name].kind == "cpu":
            continue
        matching = [
            Target(hardware[name], model, quant, facts[model])
            for model in wanted_models
            for quant in wanted_quants
            if quant in hardware[name].quants
        ]
        if not matching:
            raise BuildError(
                f"ATLAS_TARGET_HW={name} ATLAS_TARGET_MODEL={model_text} ATLAS_TARGET_QUANT={quant_text}",
                "no target matches",
                f"{name} has quants {', '.join(hardware[name].quants)}; models: {', '.join(facts)}",
            )
        targets += matching
    return Selection(tuple(targets), tuple(notes))


def _native(concrete: Mapping[str, Hardware]) -> tuple[list[str], str]:
    devices, reason = driver.gpus()
    for device in devices:
        for name, h in concrete.items():
            if h.kind == "cuda" and h.compute_capability == device.compute_capability:
                return [name, "cpu"], f"ATLAS_TARGET_HW is unset: found {device.name}, building {name} and cpu"
        capability = ".".join(map(str, device.compute_capability))
        reason = f"{device.name} (compute capability {capability}) has no hardware directory"
    return ["cpu"], f"ATLAS_TARGET_HW is unset: {reason}; building cpu only"


def _match(variable: str, text: str, known: Iterable[str]) -> list[str]:
    """Names that a comma list of names and patterns selects, in the order of `known`."""
    known = list(known)
    chosen: set[str] = set()
    for pattern in (part.strip() for part in text.split(",") if part.strip()):
        hits = fnmatch.filter(known, pattern)
        if not hits:
            near = difflib.get_close_matches(pattern, known, cutoff=0.3)
            raise BuildError(
                variable, f"unknown name {pattern!r}", ", ".join(known), f"nearest: {', '.join(near)}" if near else ""
            )
        chosen.update(hits)
    return [name for name in known if name in chosen]


def resolve(target: Target, op: str) -> Path:
    """The file that serves `op` in `target`: the nearest of `<hw>/<model>/<quant>/`, `<hw>/<model>/`, `<hw>/`,
    then the same in inherited hardware.

    Raises:
        BuildError: no file, or two files that claim the op at one level.
    """
    suffix = _SUFFIXES[target.hardware.kind]
    searched = []
    for folder in _levels(target):
        claims = sorted(path for path in folder.glob(f"{op}.*") if path.suffix in _SUFFIXES.values())
        if len(claims) > 1:
            raise BuildError(f"op {op}", f"claimed by {' and '.join(map(str, claims))}", "one file at each level")
        if claims and claims[0].suffix == suffix:
            return claims[0]
        searched.append(str(folder))
    raise BuildError(f"op {op}", f"no kernel for target {target.name}", f"{op}{suffix} in {', '.join(searched)}")


def _levels(target: Target) -> Iterable[Path]:
    for directory in target.hardware.chain:
        if target.model != ANY_MODEL:
            yield directory / target.model / target.quant
            yield directory / target.model
        yield directory


def tuning(target: Target, op: str) -> dict[str, int]:
    """Knob values stored for `op` in the nearest `tuning.toml`, a table per op; {} if none."""
    for folder in _levels(target):
        file = folder / "tuning.toml"
        if file.exists():
            table = tomllib.loads(file.read_text()).get(op)
            if table is not None:
                return dict(table)
    return {}
