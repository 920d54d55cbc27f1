"""Shows what this install of Atlas contains: python -m atlas.targets [--json]

The version of Atlas is the same for every target, so this is where the targets of an install can be seen. It also says
when the ATLAS_TARGET_* variables set now would select other targets than those installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas import installed
from atlas.cli import show
from atlas.errors import AtlasError
from atlas.targets.target import every
from atlas.targets.tree import kernels_root


def contents(file: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the record of the build at `file` says, and how the environment differs from it.

    Raises:
        AtlasError: Atlas is not built here, or the record is damaged.
    """
    if file is None:
        raise AtlasError(
            "this install", "has no record of what it was built for: Atlas is not built here", "", "run `pip install .`"
        )
    try:
        document: dict[str, Any] = json.loads(file.read_text())
        listed = [(entry["hardware"], entry["model"], entry["quant"]) for entry in document["targets"]]
        selection = dict(document["selection"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AtlasError(
            str(file), f"cannot be read ({type(error).__name__}: {error})", "", "reinstall Atlas"
        ) from None
    names = ["/".join(parts) for parts in listed]
    difference = installed.difference(environment)
    return {
        **document,
        "names": names,
        "selection": selection,
        "file": str(file),
        "difference": str(difference) if difference else "",
        "buildable": buildable(),
    }


def buildable() -> dict[str, list[str]]:
    """Hardware, models and quants that the kernel tree of this install has kernels for; empty without a tree."""
    try:
        ready = [target for target, state in every(kernels_root()).items() if state.ready]
    except AtlasError:
        return {}
    return {
        "hardware": sorted({target.hardware.name for target in ready}),
        "models": sorted({target.model for target in ready}),
        "quants": sorted({target.quant for target in ready}),
    }


def kernel_counts() -> dict[str, int] | str:
    """Kernels by target as the extension holds them, or why it cannot be asked."""
    try:
        from atlas.runtime import core

        manifest, _ = core.embedded()
    except (AtlasError, ImportError) as error:
        return str(error)
    return {kernel_set.name: len(kernel_set.kernels) for kernel_set in manifest.sets}


def text(document: Mapping[str, Any], kernels: Mapping[str, int] | str) -> str:
    """The contents for people."""
    selection = " ".join(f"{name}={value}" for name, value in document["selection"].items() if value)
    lines = [
        f"Atlas {document.get('version', '?')}, core ABI {document.get('core_abi', '?')}, "
        f"kernels compiled with {document.get('compiler', '?')}",
        f"built with {selection or 'no ATLAS_TARGET_* variable set'}",
    ]
    width = max([6, *map(len, document["names"])])
    for name, entry in zip(document["names"], document["targets"], strict=True):
        count = f"{kernels.get(name, 0)} kernels" if isinstance(kernels, Mapping) else ""
        arch, shape = entry.get("arch") or "host code", entry.get("shape_hash", "?")
        serves = "any shape" if shape == "*" else f"shape {shape}"
        lines.append(f"  {name:<{width}}  {arch:<10}  {serves:<22}  {count}".rstrip())
    parts = [f"{part} {', '.join(names)}" for part, names in document["buildable"].items()]
    lines += [f"its kernel tree has kernels for {'; '.join(parts)}"] if parts else []
    if isinstance(kernels, str):
        lines.append(f"the extension does not load: {kernels}")
    if document["difference"]:
        lines.append(f"note: {document['difference']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m atlas.targets", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the record of the build as JSON")
    arguments = parser.parse_args(argv)
    try:
        document = contents(installed.path(), os.environ)
    except AtlasError as error:
        print(f"atlas: {error}", file=sys.stderr)
        return 1
    show(json.dumps(document, indent=1) if arguments.json else text(document, kernel_counts()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        show(end="")  # the help that argparse wrote
