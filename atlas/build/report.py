"""Figures of compiled kernels, as tables and as data: what decides how well each can run.

`build_targets.py` prints them after a build and, with --report, of an earlier one. Compile times stand in a file of
their own beside the manifest: a manifest holds nothing that differs between two builds of the same input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas.build import knobs
from atlas.build import manifest as manifests
from atlas.build.kernel_file import PHASES
from atlas.build.manifest import KernelVariant, Manifest
from atlas.errors import BuildError

TIMES = "compile_seconds.json"

_COLUMNS = (("registers", "regs"), ("spills", "spill"), ("stack", "stack"), ("shared", "smem"), ("bytes", "bytes"))


def document(manifest: Manifest, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Every kernel set with its kernels' figures. `seconds`: compile time by source hash, as far as known."""
    sets = []
    for kernel_set in manifest.sets:
        kernels = [
            {
                "name": " ".join([kernel.name, *knobs.variant_words(("", *PHASES)[variant.phase], variant.max_rows)]),
                "op": kernel.op,
                "file": variant.source or kernel.source,
                "registers": variant.registers,
                "spills": variant.spills,
                "stack": variant.stack,
                "shared": variant.shared + variant.static_shared,
                "bytes": sum(manifest.images[index].size for index in (variant.image, variant.ptx) if index >= 0),
                "seconds": seconds.get(variant.source_hash, 0.0),
                "knobs": variant.knobs,
                "knobs_from": variant.knobs_from,
            }
            for kernel in kernel_set.kernels
            for variant in kernel.variants or (KernelVariant(),)
        ]
        sets.append(
            {"name": kernel_set.name, "arch": kernel_set.arch, "shape": kernel_set.shape_hash, "kernels": kernels}
        )
    return {
        "compiler": manifest.compiler,
        "selection": manifest.selection,
        "image_bytes": sum(image.size for image in manifest.images),
        "seconds": sum(seconds.values()),
        "sets": sets,
    }


def text(report: Mapping[str, Any]) -> str:
    """The report as tables, one per kernel set."""
    lines = [f"compiler: {report['compiler']}; device images: {report['image_bytes']} bytes"]
    for kernel_set in report["sets"]:
        if not kernel_set["arch"]:
            lines.append(f"{kernel_set['name']}: {len(kernel_set['kernels'])} kernels, compiled by the host compiler")
            continue
        lines.append(f"{kernel_set['name']} ({kernel_set['arch']}, shape {kernel_set['shape']})")
        width = max([6, *(len(kernel["name"]) for kernel in kernel_set["kernels"])])
        header = "".join(f"{short:>7}" for _, short in _COLUMNS)
        lines.append(f"  {'kernel':<{width}}{header}{'sec':>7}  knobs")
        for kernel in kernel_set["kernels"]:
            figures = "".join(f"{kernel[name]:>7}" for name, _ in _COLUMNS)
            lines.append(f"  {kernel['name']:<{width}}{figures}{kernel['seconds']:>7.2f}  {kernel['knobs_from']}")
    return "\n".join(lines)


def seconds_of(manifest: Manifest) -> dict[str, float]:
    """Compile time of every kernel by source hash, of a manifest that a build has just made."""
    return {
        variant.source_hash: round(variant.seconds, 3)
        for kernel_set in manifest.sets
        for kernel in kernel_set.kernels
        for variant in kernel.variants
        if variant.seconds
    }


def write_seconds(folder: Path, seconds: Mapping[str, float]) -> None:
    """Keep compile times beside the manifest in `folder`. A kernel that came from the cache keeps its old figure."""
    merged = {**_read_seconds(folder), **seconds}
    (folder / TIMES).write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """The report of the build whose manifest lies in `folder`.

    Raises:
        BuildError: no manifest there, or a damaged one.
    """
    file = folder / "manifest.json"
    try:
        words, blob = file.read_text(), (folder / "images.bin").read_bytes()
    except OSError as error:
        raise BuildError(
            str(file), f"cannot be read ({error.strerror})", "a folder that a build wrote", f"build first: {_BUILD}"
        ) from None
    manifest, _ = manifests.from_json(words, blob, str(file))
    seconds = _read_seconds(folder)
    kernels = [kernel for kernel_set in manifest.sets for kernel in kernel_set.kernels]
    hashes = {variant.source_hash for kernel in kernels for variant in kernel.variants}
    return document(manifest, {name: value for name, value in seconds.items() if name in hashes})


_BUILD = "python build_targets.py --build FOLDER"


def latest(root: Path) -> Path:
    """The folder of the newest manifest that a build of the checkout `root` left in its build folders."""
    found = sorted(root.glob("build/*/generated/manifest.json"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise BuildError(
            str(root / "build"), "holds no manifest of an earlier build", "", f"name its folder, or run {_BUILD}"
        )
    return found[-1].parent


def _read_seconds(folder: Path) -> dict[str, float]:
    try:
        stored = json.loads((folder / TIMES).read_text())
        return {str(name): float(value) for name, value in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # absent or damaged: times are for information only
