"""Targets: which (hardware, model, quant) to build.

Selection reads `ATLAS_TARGET_HW`, `ATLAS_TARGET_MODEL` and `ATLAS_TARGET_QUANT`. There is no registration
list: what exists in the kernel tree is found, and whether a target has kernels is derived (`status.py`).
Which file serves an op in a target is resolved in `resolution.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from atlas.errors import BuildError
from atlas.targets import driver
from atlas.targets.driver import Gpu
from atlas.targets.hardware import Hardware, walk
from atlas.targets.quant import QUANTS
from atlas.targets.resolution import ANY_MODEL, MissingKernel, Target, facts, find, resolve, tuning
from atlas.targets.status import Status, models, status, summary
from atlas.targets.tree import check_tree

__all__ = [
    "ANY_MODEL",
    "VARIABLES",
    "MissingKernel",
    "Selection",
    "Status",
    "Target",
    "every",
    "facts",
    "find",
    "models",
    "native",
    "resolve",
    "select",
    "status",
    "tuning",
]

VARIABLES = ("ATLAS_TARGET_HW", "ATLAS_TARGET_MODEL", "ATLAS_TARGET_QUANT")


@dataclasses.dataclass(frozen=True)
class Selection:
    """Targets to build, and remarks for the user (why a GPU was or was not chosen, what was skipped)."""

    targets: tuple[Target, ...]
    notes: tuple[str, ...]

    def needs_cuda(self) -> bool:
        return any(target.hardware.kind == "cuda" for target in self.targets)


@dataclasses.dataclass(frozen=True)
class _Match:
    """What a variable selects: names, and those of them that it spells out rather than matches."""

    names: list[str]
    exact: set[str]


def select(root: Path, environment: Mapping[str, str]) -> Selection:
    """The targets that the environment asks for; `cpu` always among them.

    Each variable is a name, a comma list or `*` patterns. MODEL and QUANT default to `*`, HW to `native`: the
    directories that match this machine's GPUs, plus `cpu`. Patterns skip targets without kernels, with a note.

    Raises:
        BuildError: an unknown name (with the nearest ones), a name that gives no target with kernels, or a
            combination that matches nothing.
    """
    hardware = walk(root)
    known = facts(root)
    check_tree(root, hardware, known)
    concrete = {name: h for name, h in hardware.items() if not h.abstract}
    requested = environment.get("ATLAS_TARGET_HW") or "native"
    notes: list[str] = []
    if requested == "native":
        names, note = native(concrete, *driver.gpus())
        chosen = _Match(names, set())
        notes.append(note)
    else:
        chosen = _match("ATLAS_TARGET_HW", requested, concrete)
    wanted_models = _match("ATLAS_TARGET_MODEL", environment.get("ATLAS_TARGET_MODEL") or "*", known)
    wanted_quants = _match("ATLAS_TARGET_QUANT", environment.get("ATLAS_TARGET_QUANT") or "*", QUANTS)

    gpus = [concrete[name] for name in chosen.names if concrete[name].kind != "cpu"]
    # `cpu` is built in any case; where it was asked for, it counts as something that has kernels.
    cpus = [hardware["cpu"]] if not gpus or (requested != "native" and "cpu" in chosen.names) else []
    candidates = {
        target: status(target)
        for h in (*gpus, *cpus)
        for model in wanted_models.names
        for quant in wanted_quants.names
        for target in [Target(h, model, quant, known[model])]
    }
    asked = " ".join(f"{name}={environment[name]}" for name in VARIABLES if environment.get(name)) or "ATLAS_TARGET_*"
    matches = {"model": wanted_models, "quant": wanted_quants, "hardware": chosen}
    _refuse(asked, candidates, matches, root)
    if gpus:
        notes += _skipped(candidates)
    targets = [Target(hardware["cpu"], ANY_MODEL, quant, {}) for quant in hardware["cpu"].quants]
    targets += [target for target, state in candidates.items() if state.ready and target.hardware.kind != "cpu"]
    return Selection(tuple(targets), tuple(notes))


def every(root: Path) -> dict[Target, Status]:
    """Every (hardware, model, quant) of the tree and its status. Where kernels serve any model (`cpu`), the model
    is a concrete one all the same: it says whether that model's program can be recorded."""
    return {
        target: status(target)
        for h in walk(root).values()
        if not h.abstract
        for model, config in facts(root).items()
        for quant in QUANTS
        for target in [Target(h, model, quant, config)]
    }


def _refuse(asked: str, candidates: Mapping[Target, Status], matches: Mapping[str, _Match], root: Path) -> None:
    """Refuse a selection that would build nothing of something that was named."""
    for target, state in candidates.items():
        if not state.ready and all(_part(target, part) in match.exact for part, match in matches.items()):
            found = f"{target.name} has {state}"
            if state.missing:
                found += f", sought as {state.missing.accepted}"
            raise BuildError(asked, found, _ready(candidates, root), _LIST)
    for h in {target.hardware.name: target.hardware for target in candidates}.values():
        for quant in h.quants:
            states = [s for target, s in candidates.items() if target.hardware == h and target.quant == quant]
            missing = [state.missing for state in states if state.missing]
            if missing and not any(state.ready for state in states):
                # Whatever the model, a kernel is missing: the tree is broken, not the selection.
                raise missing[0]
    for part, match in matches.items():
        for name in sorted(match.exact):
            own = {target: state for target, state in candidates.items() if _part(target, part) == name}
            if own and not any(state.ready for state in own.values()):
                found = f"{part} {name} has no kernels yet: {summary(own)}"
                raise BuildError(asked, found, _ready(candidates, root), _LIST)
    if not any(state.ready for state in candidates.values()):
        hardware = [name for name, h in walk(root).items() if not h.abstract]
        everything = f"hardware: {', '.join(hardware)}; models: {', '.join(facts(root))}; quants: {', '.join(QUANTS)}"
        found = f"no target matches: {summary(candidates)}"
        raise BuildError(asked, found, f"{_ready(candidates, root)}; {everything}", _LIST)


_LIST = "`python build_targets.py --list` shows the status of every target"


def _part(target: Target, part: str) -> str:
    return {"hardware": target.hardware.name, "model": target.model, "quant": target.quant}[part]


def _ready(candidates: Iterable[Target], root: Path) -> str:
    """The targets with kernels of the hardware in question, whatever the model."""
    hardware = {target.hardware.name for target in candidates}
    names = [t.name for t, state in every(root).items() if state.ready and t.hardware.name in hardware]
    return f"ready: {', '.join(names) or 'none'}"


def _skipped(candidates: Mapping[Target, Status]) -> list[str]:
    count = sum(not state.ready for state in candidates.values())
    if not count:
        return []
    return [f"skipped {count} of {len(candidates)} targets that have no kernels yet: {summary(candidates)}"]


def native(concrete: Mapping[str, Hardware], devices: Sequence[Gpu], reason: str) -> tuple[list[str], str]:
    """The hardware directories of this machine's GPUs, plus `cpu`, and a remark.

    Directories of a device's compute capability are tried in this order, each group by name: those with a
    `device_names` pattern that matches the device's name, those without `device_names`, the rest.
    """
    found: dict[str, str] = {}
    unknown = []
    for device in devices:
        capability = ".".join(map(str, device.compute_capability))
        fitting = [
            h for h in concrete.values() if h.kind == "cuda" and h.compute_capability == device.compute_capability
        ]
        if not fitting:
            unknown.append(f"{device.name} (compute capability {capability}) has no hardware directory")
            continue
        best = min(fitting, key=lambda h: (_rank(h, device.name), h.name))
        others = sorted(h.name for h in fitting if h is not best)
        also = f" (of compute capability {capability} there is also {', '.join(others)})" if others else ""
        found.setdefault(best.name, device.name + also)
    if found:
        text = "; ".join([f"found {device}" for device in found.values()] + unknown)
        return [*found, "cpu"], f"ATLAS_TARGET_HW is native: {text}, building {', '.join(found)} and cpu"
    return ["cpu"], f"ATLAS_TARGET_HW is native: {'; '.join(unknown) or reason}; building cpu only"


def _rank(hardware: Hardware, device: str) -> int:
    if any(fnmatch.fnmatch(device.lower(), pattern.lower()) for pattern in hardware.device_names):
        return 0
    return 2 if hardware.device_names else 1


def _match(variable: str, text: str, known: Iterable[str]) -> _Match:
    """Names that a comma list of names and patterns selects, in the order of `known`."""
    known = list(known)
    chosen: set[str] = set()
    exact: set[str] = set()
    for pattern in (part.strip() for part in text.split(",") if part.strip()):
        hits = {pattern} if pattern in known else set(fnmatch.filter(known, pattern))
        if not hits:
            near = difflib.get_close_matches(pattern, known, cutoff=0.3)
            raise BuildError(
                variable, f"unknown name {pattern!r}", ", ".join(known), f"nearest: {', '.join(near)}" if near else ""
            )
        chosen |= hits
        exact |= hits & {pattern}
    if not chosen:
        raise BuildError(variable, f"{text!r} names nothing", ", ".join(known))
    return _Match([name for name in known if name in chosen], exact)
