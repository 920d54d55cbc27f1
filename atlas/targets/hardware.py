"""Hardware directories: `kernels/<name>/HARDWARE.toml`, found by walking, validated on reading.

`inherits` names another directory: kernels, tuning and facts that a directory does not have come from there,
so that it states only what differs. What is validated is the result.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas.build import architecture
from atlas.errors import BuildError
from atlas.targets.quant import QUANTS


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of HARDWARE.toml. inherited: a directory without it has its parent's.
    required: kinds ("cpu", "cuda") of selectable hardware that must end up with it."""

    type: type
    meaning: str
    inherited: bool = False
    required: tuple[str, ...] = ()


_BOTH, _CUDA, _CPU = ("cpu", "cuda"), ("cuda",), ("cpu",)

FIELDS: dict[str, Field] = {
    "name": Field(str, "the directory's name, again: a copied file shows up", required=_BOTH),
    "description": Field(str, "one line for lists", required=_BOTH),
    "abstract": Field(bool, "true: only to inherit from, cannot be selected"),
    "inherits": Field(str, "hardware whose kernels, tuning and facts are used where this one has none"),
    "kind": Field(str, "`cpu` or `cuda`", True, _BOTH),
    "quants": Field(list, "quant recipes this hardware has kernels for", True, _BOTH),
    "arch": Field(str, "ptxas target, e.g. `sm_90a`; an image of it must run on `compute_capability`", True, _CUDA),
    "compute_capability": Field(list, "[major, minor] of the devices it is for", True, _CUDA),
    "multiprocessors": Field(int, "streaming multiprocessors; for cost models, never in a kernel", True, _CUDA),
    "shared_memory_per_block": Field(int, "largest shared memory of a block that opts in, bytes", True, _CUDA),
    "cluster_blocks": Field(int, "most blocks of a cluster (none stated: 1); for geometry and knobs", True),
    "layouts": Field(
        dict, "names that kernel files may use for a layout -> the layout (atlas/weights/layouts.py)", True
    ),
    "device_names": Field(list, "patterns of device names: decides among directories of one compute capability"),
    "levels": Field(list, "instruction-set levels, best first: tables of name, machine, flags, on_request", True, _CPU),
}
"""Every field a HARDWARE.toml may have."""

_LEVEL_FIELDS = {"name": str, "machine": str, "flags": list, "on_request": bool}
_TYPE_NAMES = {str: "text", bool: "true or false", int: "an integer", list: "a list", dict: "a table"}


@dataclasses.dataclass(frozen=True)
class Level:
    """An instruction-set level of CPU kernels: compiled with `flags` where `machine` matches.

    on_request: only kernel files whose declaration names it are compiled for it.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    on_request: bool


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One HARDWARE.toml. `directory` is its folder; `chain` the folders kernels are looked up in, nearest first."""

    name: str
    kind: str
    description: str
    directory: Path
    chain: tuple[Path, ...]
    abstract: bool
    quants: tuple[str, ...]
    arch: str = ""
    compute_capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    shared_memory_per_block: int = 0
    cluster_blocks: int = 1
    layouts: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    device_names: tuple[str, ...] = ()
    levels: tuple[Level, ...] = ()


def fields_table() -> str:
    """The fields as a Markdown table: the one in docs/adding-hardware.md."""
    rows = ["| field | type | required | inherited | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, field in FIELDS.items():
        required = "always" if field.required == _BOTH else ", ".join(f"`{kind}`" for kind in field.required)
        inherited = "yes" if field.inherited else ""
        rows.append(f"| `{name}` | {_TYPE_NAMES[field.type]} | {required} | {inherited} | {field.meaning} |")
    return "\n".join(rows)


def walk(root: Path) -> dict[str, Hardware]:
    """Every hardware directory under the kernel tree `root`, by name.

    Raises:
        BuildError: an unknown key (with the nearest known one), a missing, ill-typed or contradictory field,
            or an `inherits` that names nothing or runs in a circle.
    """
    documents = {file.parent.name: _read(file) for file in sorted(root.glob("*/HARDWARE.toml"))}
    return {name: _hardware(root, name, documents) for name in documents}


def _read(file: Path) -> dict[str, Any]:
    """One file's own fields, each of its type."""
    try:
        document = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise BuildError(str(file), f"not valid TOML: {error}") from None
    for key, value in document.items():
        if key not in FIELDS:
            near = difflib.get_close_matches(key, FIELDS)
            raise BuildError(
                str(file), f"unknown key {key!r}", ", ".join(FIELDS), f"nearest: {near[0]}" if near else ""
            )
        kind = FIELDS[key].type
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise BuildError(str(file), f"{key} is {value!r}", f"{_TYPE_NAMES[kind]}: {FIELDS[key].meaning}")
    if document.get("name") != file.parent.name:
        raise BuildError(str(file), f"name is {document.get('name')!r}", f"{file.parent.name!r}, the directory's name")
    return document


def _ancestors(root: Path, name: str, documents: dict[str, dict[str, Any]]) -> list[str]:
    """`name` and what it inherits from, nearest first."""
    names = [name]
    while parent := documents[names[-1]].get("inherits"):
        where = str(root / names[-1] / "HARDWARE.toml")
        if parent not in documents:
            near = difflib.get_close_matches(parent, documents)
            raise BuildError(
                where, f"inherits {parent!r}", ", ".join(sorted(documents)), f"nearest: {near[0]}" if near else ""
            )
        if parent in names:
            raise BuildError(where, f"inherits {parent!r}: a circle", "a chain that ends", "drop one of the `inherits`")
        names.append(parent)
    return names


def _hardware(root: Path, name: str, documents: dict[str, dict[str, Any]]) -> Hardware:
    names, where = _ancestors(root, name, documents), str(root / name / "HARDWARE.toml")
    stated: dict[str, Any] = dict(documents[name])
    for parent in names[1:]:
        if "kind" in stated and documents[parent].get("kind", stated["kind"]) != stated["kind"]:
            raise BuildError(
                where, f"kind is {stated['kind']!r}", f"{documents[parent]['kind']!r}, the kind of {parent}"
            )
        inherited = {key: value for key, value in documents[parent].items() if FIELDS[key].inherited}
        stated = {**inherited, **stated}
    if stated.get("kind") not in _BOTH:
        raise BuildError(where, f"kind is {stated.get('kind')!r}", FIELDS["kind"].meaning)
    _check(where, stated)
    major, minor = stated.get("compute_capability", [0, 0])
    return Hardware(
        name=name,
        kind=stated["kind"],
        description=stated["description"],
        directory=root / name,
        chain=tuple(root / ancestor for ancestor in names),
        abstract=stated.get("abstract", False),
        quants=tuple(stated.get("quants", ())),
        arch=stated.get("arch", ""),
        compute_capability=(major, minor),
        multiprocessors=stated.get("multiprocessors", 0),
        shared_memory_per_block=stated.get("shared_memory_per_block", 0),
        cluster_blocks=stated.get("cluster_blocks", 1),
        layouts=stated.get("layouts", {}),
        device_names=tuple(stated.get("device_names", ())),
        levels=tuple(
            Level(level["name"], level["machine"], tuple(level["flags"]), level["on_request"])
            for level in stated.get("levels", [])
        ),
    )


def _check(where: str, stated: dict[str, Any]) -> None:
    """What an HARDWARE.toml says together with what it inherits."""
    for key, field in FIELDS.items():
        always = key in ("name", "description", "kind")
        if key not in stated and stated["kind"] in field.required and (always or not stated.get("abstract")):
            raise BuildError(where, f"{key} is missing", field.meaning, "state it, or inherit from hardware that does")
    for quant in stated.get("quants", []):
        if quant not in QUANTS:
            near = difflib.get_close_matches(str(quant), QUANTS)
            fix = f"nearest: {near[0]}" if near else ""
            raise BuildError(where, f"quants names {quant!r}", ", ".join(sorted(QUANTS)), fix)
    for name, layout in stated.get("layouts", {}).items():
        if not isinstance(layout, str):
            raise BuildError(where, f"layouts.{name} is {layout!r}", "the name of a layout")
    for key in ("multiprocessors", "shared_memory_per_block", "cluster_blocks"):
        if stated.get(key, 1) <= 0:
            raise BuildError(where, f"{key} is {stated[key]}", f"more than 0: {FIELDS[key].meaning}")
    capability = stated.get("compute_capability", [0, 0])
    if len(capability) != 2 or not all(type(part) is int and part >= 0 for part in capability):
        raise BuildError(where, f"compute_capability is {capability!r}", "[major, minor], e.g. [9, 0]")
    if "arch" in stated and "compute_capability" in stated:
        reason = architecture.runs_on(stated["arch"], (capability[0], capability[1]))
        if reason or architecture.parse(stated["arch"]).virtual:
            raise BuildError(where, f"arch is {stated['arch']!r}", "code for its compute_capability", reason or "")
    if not all(isinstance(name, str) and name for name in stated.get("device_names", [])):
        raise BuildError(where, f"device_names is {stated['device_names']!r}", "patterns, e.g. ['*RTX 4090*']")
    for level in stated.get("levels", []):
        if not isinstance(level, dict) or {k: type(v) for k, v in level.items()} != _LEVEL_FIELDS:
            raise BuildError(
                where, f"level {level!r}", "name, machine (text), flags (a list), on_request (true or false)"
            )
