"""Whether a target has kernels, derived from the tree: ready, or "no kernels yet" and why."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError, BuildError
from atlas.models import family_of
from atlas.models.family import FormatOf
from atlas.models.fusion import HasKernel, record
from atlas.runtime import load_program
from atlas.runtime.program import KernelKey
from atlas.targets.formats import ROLE_FORMATS, compiled_formats, plain_format
from atlas.targets.quant import recipe
from atlas.targets.resolution import ANY_MODEL, MissingKernel, Target, facts, find
from atlas.targets.shape import Shard


@dataclasses.dataclass(frozen=True)
class Status:
    """reason: why there are no kernels, empty where the target is ready.

    lacks: what there is none of: "family" (for the model), "quant" (on the hardware), "op" (in the recipe), or
        "kernel" (for an op of the recorded program; `missing` is then the error that names it).
    """

    reason: str = ""
    lacks: str = ""
    missing: MissingKernel | None = None

    @property
    def ready(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return "ready" if self.ready else f"no kernels yet: {self.reason}"


def status(target: Target) -> Status:
    """The status of a target.

    Raises:
        BuildError: a tree that contradicts itself (two files that claim an op at one level).
    """
    keys: Mapping[KernelKey, tuple[str, ...]] = {}
    if target.model != ANY_MODEL and (reason := unrecorded(target.facts)):
        return Status(reason, "family")
    if target.quant not in target.hardware.quants:
        return Status(f"{target.hardware.name} has no {target.quant} kernels", "quant")
    if target.model != ANY_MODEL:
        keys, reason = _needed(target.facts, target.quant, target.hardware.kind, has_kernel(target), target.stored)
        if reason:
            return Status(reason, "op")
    for key, phases in keys.items():
        for phase in phases:
            try:
                find(target, key.op, phase, dict(key.dtypes), dict(key.constants))
            except MissingKernel as error:
                return Status(f"{target.hardware.name} has no kernel for op {key.op}", "kernel", error)
    return Status()


def summary(states: Mapping[Target, Status]) -> str:
    """Why targets have no kernels, in one line: what many lack alike is said once."""
    groups: dict[str, dict[Target, str]] = {}
    for target, state in states.items():
        if not state.ready:
            key = state.lacks if state.lacks in ("family", "quant") else state.reason
            groups.setdefault(key, {})[target] = state.reason
    parts = []
    for key, reasons in groups.items():
        names = {part: list(dict.fromkeys(text(target) for target in reasons)) for part, text in _PARTS.items()}
        if len(set(reasons.values())) == 1:
            text = next(iter(reasons.values()))
        elif key == "family":
            text = f"no family in atlas/models records {', '.join(names['model'])}"
        else:
            text = ", ".join(_absent_quants(reasons))
        parts.append(f"{text} ({len(reasons)})" if len(groups) > 1 else text)
    return "; ".join(parts)


def _absent_quants(targets: Iterable[Target]) -> list[str]:
    """`cpu has no fp8 kernels` for each group of hardware that lacks the same quants."""
    lacks: dict[str, dict[str, None]] = {}
    for target in targets:
        lacks.setdefault(target.hardware.name, {})[target.quant] = None
    alike: dict[tuple[str, ...], list[str]] = {}
    for hardware, quants in lacks.items():
        alike.setdefault(tuple(quants), []).append(hardware)
    return [
        f"{', '.join(hardware)} {'has' if len(hardware) == 1 else 'have'} no {', '.join(quants)} kernels"
        for quants, hardware in alike.items()
    ]


_PARTS: dict[str, Callable[[Target], str]] = {
    "hardware": lambda target: target.hardware.name,
    "model": lambda target: target.model,
    "quant": lambda target: target.quant,
}


def unrecorded(config: Mapping[str, Any]) -> str:
    """Why no family records this model; empty if one does."""
    names = config.get("architectures") or ["?"]
    try:
        family = family_of(config)
    except AtlasError:
        return f"no family in atlas/models records {names[0]}"
    try:
        family.configure(config, Shard())
    except AtlasError as error:
        return f"the family of {names[0]} does not record it: {error.found}"
    return ""


def has_kernel(target: Target) -> HasKernel:
    """Whether the target has a kernel that a program does without where there is none (atlas/models/fusion.py)."""

    def has(key: KernelKey) -> bool:
        try:
            find(target, key.op, "decode", dict(key.dtypes), dict(key.constants))
        except MissingKernel:
            return False
        return True

    return has


_NOTHING: Mapping[str, str] = {}


def closure(
    config: Mapping[str, Any],
    quant: str,
    kind: str = "cuda",
    has: HasKernel = lambda key: False,
    stored: Mapping[str, str] = _NOTHING,
) -> Mapping[KernelKey, tuple[str, ...]]:
    """Every kernel that a model's programs need under a recipe, and the phases that need it.

    has: as `has_kernel` gives it.  stored: as a target has it.

    Raises BuildError where there are none.
    """
    keys, reason = _needed(config, quant, kind, has, stored)
    if reason:
        raise BuildError(f"quant {quant}", reason)
    return keys


def _needed(
    config: Mapping[str, Any], quant: str, kind: str, has: HasKernel, stored: Mapping[str, str]
) -> tuple[Mapping[KernelKey, tuple[str, ...]], str]:
    """Every kernel of a model's programs under a recipe, or why they cannot be recorded."""
    asked = _Asked(json.dumps(config, sort_keys=True), quant, kind, tuple(sorted(stored.items())))
    optional, plain = _without(asked)
    there = frozenset(filter(has, optional))
    return _closure(asked, there) if there else plain


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Whose kernels are asked for. config: JSON."""

    config: str
    quant: str
    kind: str
    stored: tuple[tuple[str, str], ...]


_Needed = tuple[Mapping[KernelKey, tuple[str, ...]], str]


@functools.cache
def _without(asked: _Asked) -> tuple[tuple[KernelKey, ...], _Needed]:
    """The kernels that a model's programs use where there are some, and _needed where there are none."""
    found: dict[KernelKey, None] = {}

    def note(key: KernelKey) -> bool:
        found[key] = None
        return False

    needed = _record(asked, note)
    return tuple(found), needed


@functools.cache
def _closure(asked: _Asked, there: frozenset[KernelKey]) -> _Needed:
    """_needed, with those kernels that are there of the ones that a program may do without."""
    return _record(asked, there.__contains__)


def _record(asked: _Asked, has: HasKernel) -> _Needed:
    document, kind = json.loads(asked.config), asked.kind
    family = family_of(document)
    try:
        configured, roles = family.configure(document, Shard()), recipe(asked.quant, kind)
        needed: dict[KernelKey, tuple[str, ...]] = {}
        for format_of in _choices(roles.projections, kind, document, dict(asked.stored)):
            programs = record(family, configured, roles, kind, format_of, has)
            for key, phases in programs.closure().items():
                needed[key] = tuple(sorted({*needed.get(key, ()), *phases}, reverse=True))
            if kind == "cuda":
                needed |= dict.fromkeys(load_program.keys(programs), ("prefill", "decode"))
        return needed, ""
    except AtlasError as error:
        return {}, f"recipe {asked.quant} has no ops: {error.where}: {error.found}"


def _choices(word: str, kind: str, config: Mapping[str, Any], stored: Mapping[str, str]) -> list[FormatOf]:
    """The formats that a model's weights may have. word: what the recipe says of its projections.

    A checkpoint may hold its weights in any format of a role, and what none holds is bf16: one format for all of them
    at a time. `stored` is a mixture of its own.
    """
    if kind != "cuda" or word not in ROLE_FORMATS:
        return [lambda name, role: plain_format(role)]

    def only(format: str) -> FormatOf:
        return lambda name, role: format if role == word else plain_format(role)

    choices = [only(format) for format in (*compiled_formats(word, config), "bf16")]
    return [*choices, lambda name, role: stored.get(name) or plain_format(role)] if stored else choices


def models(root: Path) -> dict[str, dict[str, Any]]:
    """Facts of the models that a family records: those that kernels can be compiled for."""
    return {name: config for name, config in facts(root).items() if not unrecorded(config)}
