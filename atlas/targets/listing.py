"""What `build_targets.py` shows of a kernel tree: --list, --plan and --matrix, as data and as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError, BuildError
from atlas.models import family_of
from atlas.ops import OPS
from atlas.targets.hardware import walk
from atlas.targets.quant import QUANTS
from atlas.targets.resolution import ANY_MODEL, Target, facts, find
from atlas.targets.shape import Shard, shape
from atlas.targets.status import closure, has_kernel, models, summary
from atlas.targets.target import every, select

TAG_PREFIX = "1_"
"""A wheel's build tag must begin with a digit."""


def tree(root: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Hardware, models, quants, the status of every target, and what the environment selects."""
    states = every(root)
    document: dict[str, Any] = {
        "hardware": [
            {
                "name": name,
                "kind": h.kind,
                "abstract": h.abstract,
                "arch": h.arch,
                "multiprocessors": h.multiprocessors,
                "shared_memory_per_block": h.shared_memory_per_block,
                "inherits": [folder.name for folder in h.chain[1:]],
                "quants": list(h.quants),
                "description": h.description,
            }
            for name, h in walk(root).items()
        ],
        "models": [
            {
                "name": name,
                "architecture": (config.get("architectures") or ["?"])[0],
                "shape": shape(config).hash(),
                "ready": [target.name for target, state in states.items() if target.model == name and state.ready],
                "lacks": summary({t: s for t, s in states.items() if t.model == name and s.lacks not in ("", "quant")}),
                "source": config.get("source", ""),
            }
            for name, config in facts(root).items()
        ],
        "quants": [
            {
                "name": quant,
                "hardware": sorted({t.hardware.name for t, s in states.items() if t.quant == quant and s.ready}),
            }
            for quant in QUANTS
        ],
        "targets": [{"name": target.name, "status": str(state)} for target, state in states.items()],
    }
    try:
        selection = select(root, environment)
        document["selected"] = [target.name for target in selection.targets]
        document["notes"] = list(selection.notes)
    except AtlasError as error:
        # The list is what an error about names points to: it must not fail for the same reason.
        document["selected"], document["notes"] = [], [str(error)]
    return document


def tree_text(document: Mapping[str, Any]) -> str:
    """`tree` for people."""
    rows: list[tuple[Any, ...]] = [("hardware", "arch", "SMs", "kernels for", "description")]
    for h in document["hardware"]:
        arch = "abstract" if h["abstract"] else h["arch"] or "host"
        rows.append((h["name"], arch, h["multiprocessors"] or "", ", ".join(h["quants"]) or "-", h["description"]))
    lines = _columns(rows)
    rows = [("model", "shape", "ready for")]
    for model in document["models"]:
        rows.append((model["name"], model["shape"], _grouped(name.split("/") for name in model["ready"]) or "-"))
    lines += ["", *_columns(rows), ""]
    lines += [f"no kernels yet for {model['name']}: {model['lacks']}" for model in document["models"] if model["lacks"]]
    rows = [("quant", "ready on")]
    rows += [(quant["name"], ", ".join(quant["hardware"]) or "no kernels yet") for quant in document["quants"]]
    lines += ["", *_columns(rows), ""]
    return "\n".join([*lines, *document["notes"], f"selected: {', '.join(document['selected']) or 'nothing'}"])


def _grouped(names: Iterable[list[str]]) -> str:
    """`gb10, h200: bf16, fp8; cpu: f32, bf16` of (hardware, model, quant) names."""
    quants: dict[str, list[str]] = {}
    for hardware, _, quant in names:
        quants.setdefault(hardware, []).append(quant)
    alike: dict[tuple[str, ...], list[str]] = {}
    for hardware, served in quants.items():
        alike.setdefault(tuple(served), []).append(hardware)
    return "; ".join(f"{', '.join(hardware)}: {', '.join(served)}" for served, hardware in alike.items())


def _columns(rows: Iterable[tuple[Any, ...]]) -> list[str]:
    text = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in text) for column in range(len(text[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in text]


def plan(root: Path, targets: Iterable[Target]) -> list[dict[str, Any]]:
    """For every target the kernels of its closure, with the file that serves each and why. Compiles nothing.

    Raises:
        BuildError: an op without a file (naming op, target and the places searched), or two claims at one level.
    """
    return [{"target": target.name, **_described(root, target)} for target in targets]


def _described(root: Path, target: Target) -> dict[str, Any]:
    if target.model == ANY_MODEL:
        # Kernels with run-time dims: one per signature serves every model that can be recorded.
        signatures: dict[str, str] = {}
        for config in models(root).values():
            signatures |= {key.signature(): key.op for key in closure(config, target.quant, target.hardware.kind)}
        kernels, shape_hash = sorted(signatures.items(), key=lambda item: list(OPS).index(item[1])), "*"
        rows = [_row(root, target, name, op, ("decode",), {}, None) for name, op in kernels]
    else:
        family = family_of(target.facts)
        shape_hash = family.configure(target.facts, Shard()).shape.hash()
        needed = closure(target.facts, target.quant, target.hardware.kind, has_kernel(target))
        rows = [
            _row(root, target, key.name(), key.op, phases, dict(key.dtypes), dict(key.constants))
            for key, phases in needed.items()
        ]
    return {"arch": target.hardware.arch, "shape": shape_hash, "kernels": rows}


def _row(
    root: Path,
    target: Target,
    name: str,
    op: str,
    phases: Iterable[str],
    dtypes: Mapping[str, str],
    constants: Mapping[str, int | float] | None,
) -> dict[str, str]:
    """One kernel; where the phases have files of their own, both."""
    found = [find(target, op, phase, dtypes, constants) for phase in phases]
    files = dict.fromkeys(path.relative_to(root).as_posix() for path, _ in found)
    why = dict.fromkeys(level.why for _, level in found)
    return {"op": op, "kernel": name, "file": ", ".join(files), "why": "; ".join(why)}


def plan_text(plans: Iterable[Mapping[str, Any]]) -> str:
    """`plan` for people."""
    lines = []
    for entry in plans:
        arch = entry["arch"] or "compiled by the host compiler"
        lines.append(f"{entry['target']} ({arch}, shape {entry['shape']}): {len(entry['kernels'])} kernels")
        rows = [(f"  {k['kernel']}", k["file"], k["why"]) for k in entry["kernels"]]
        lines += _columns(rows)
    return "\n".join(lines)


def matrix(root: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """A GitHub Actions matrix: one wheel per ready (hardware, model, quant), and one of `cpu` alone.

    Every hardware takes part unless ATLAS_TARGET_HW names some: what the building machine has does not matter.
    """
    selection = select(root, {"ATLAS_TARGET_HW": "*", **{k: v for k, v in environment.items() if v}})
    parts = [("cpu", "*", "*")]
    parts += [(t.hardware.name, t.model, t.quant) for t in selection.targets if t.hardware.kind != "cpu"]
    entries = [{"hw": hw, "model": model, "quant": quant, "tag": tag(hw, model, quant)} for hw, model, quant in parts]
    tags = [entry["tag"] for entry in entries]
    for name in tags:
        if tags.count(name) > 1:
            raise BuildError(
                "build tag", f"{name} names more than one target", "names that differ in letters or digits"
            )
    return {"include": entries}


def tag(hardware: str, model: str, quant: str) -> str:
    """The build tag of a wheel with one target: `1_h200_llama_3_8b_bf16`; wheel tags hold no `-` and no `.`."""
    parts = [part for part in (hardware, model, quant) if part != "*"]
    return TAG_PREFIX + re.sub(r"[^A-Za-z0-9]+", "_", "_".join(parts))
