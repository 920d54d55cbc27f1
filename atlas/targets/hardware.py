"""Hardware directories: `kernels/<name>/HARDWARE.toml`, found by walking, validated on reading."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from pathlib import Path
from typing import Any

from atlas.errors import BuildError

FIELDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "name": (str, "the directory's name, again: a copied file shows up"),
    "kind": (str, "'cpu' or 'cuda'"),
    "description": (str, "one line for lists"),
    "abstract": (bool, "true: only to inherit from, cannot be selected"),
    "inherits": (str, "hardware whose kernels are used where this one has none"),
    "quants": (list, "quant recipes this hardware has kernels for"),
    "arch": (str, "cuda: ptxas target, e.g. sm_90a"),
    "compute_capability": (list, "cuda: [major, minor] of devices it runs on"),
    "multiprocessors": (int, "cuda: streaming multiprocessors of the device"),
    "shared_memory_per_block": (int, "cuda: largest dynamic shared memory of a block, bytes"),
    "levels": (list, "cpu: instruction-set levels, best first"),
}
"""Every field a HARDWARE.toml may have: its type and meaning."""

_LEVEL_FIELDS = {"name": str, "machine": str, "flags": list}


@dataclasses.dataclass(frozen=True)
class Level:
    """An instruction-set level of CPU kernels: compiled with `flags` where `machine` matches."""

    name: str
    machine: str
    flags: tuple[str, ...]


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
    levels: tuple[Level, ...] = ()


def walk(root: Path) -> dict[str, Hardware]:
    """Every hardware directory under the kernel tree `root`, by name.

    Raises:
        BuildError: an unknown key (with the nearest known one), a missing or ill-typed field, or an
            `inherits` that names nothing or runs in a circle.
    """
    documents: dict[str, dict[str, Any]] = {}
    for file in sorted(root.glob("*/HARDWARE.toml")):
        documents[file.parent.name] = _read(file)
    return {name: _hardware(root, name, documents) for name in documents}


def _read(file: Path) -> dict[str, Any]:
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
        if not isinstance(value, FIELDS[key][0]):
            raise BuildError(str(file), f"{key} is {value!r}", FIELDS[key][1])
    required = ["name", "kind", "description"]
    if document.get("kind") == "cuda" and not document.get("abstract"):
        required += ["arch", "compute_capability", "multiprocessors", "shared_memory_per_block", "quants"]
    if document.get("kind") == "cpu":
        required += ["levels", "quants"]
    for key in required:
        if key not in document:
            raise BuildError(str(file), f"{key} is missing", FIELDS[key][1])
    if document["name"] != file.parent.name:
        raise BuildError(str(file), f"name is {document['name']!r}", f"{file.parent.name!r}, the directory's name")
    if document["kind"] not in ("cpu", "cuda"):
        raise BuildError(str(file), f"kind is {document['kind']!r}", FIELDS["kind"][1])
    for level in document.get("levels", []):
        if not isinstance(level, dict) or {k: type(v) for k, v in level.items()} != _LEVEL_FIELDS:
            raise BuildError(str(file), f"level {level!r}", "name, machine (text) and flags (a list)")
    return document


def _hardware(root: Path, name: str, documents: dict[str, dict[str, Any]]) -> Hardware:
    document = documents[name]
    chain, current = [root / name], document
    while parent := current.get("inherits"):
        if parent not in documents:
            raise BuildError(str(chain[-1] / "HARDWARE.toml"), f"inherits {parent!r}", ", ".join(sorted(documents)))
        if root / parent in chain:
            raise BuildError(str(chain[-1] / "HARDWARE.toml"), f"inherits {parent!r}: a circle")
        chain.append(root / parent)
        current = documents[parent]
    major, minor = document.get("compute_capability", [0, 0])
    return Hardware(
        name=name,
        kind=document["kind"],
        description=document["description"],
        directory=root / name,
        chain=tuple(chain),
        abstract=document.get("abstract", False),
        quants=tuple(document.get("quants", ())),
        arch=document.get("arch", ""),
        compute_capability=(major, minor),
        multiprocessors=document.get("multiprocessors", 0),
        shared_memory_per_block=document.get("shared_memory_per_block", 0),
        levels=tuple(
            Level(level["name"], level["machine"], tuple(level["flags"])) for level in document.get("levels", [])
        ),
    )
