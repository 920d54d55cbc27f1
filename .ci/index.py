#!/usr/bin/env python3
"""Makes one package index (PEP 503) for each target: `.ci/index.py WHEELS INDEX`.

All wheels of a release have one version, and pip knows nothing of targets; so each target has an index of its
own, in the folder that its build tag names: INDEX/h200_llama_3_8b_bf16/atlas-infer/index.html.
"""

from __future__ import annotations

import hashlib
import html
import shutil
import sys
from pathlib import Path

PROJECT = "atlas-infer"


def target_of(wheel: Path) -> str:
    """The target that a wheel's build tag names: `1_h200_llama_3_8b_bf16` -> `h200_llama_3_8b_bf16`.

    Raises:
        ValueError: the file name has no build tag, so nothing tells its target.
    """
    parts = wheel.stem.split("-")
    if len(parts) != 6 or "_" not in parts[2]:
        raise ValueError(f"{wheel.name} has no build tag NUMBER_TARGET; build it with wheel.build-tag")
    return parts[2].partition("_")[2]


def make(wheels: Path, index: Path) -> list[str]:
    """Copy the wheels into an index for each target. Returns the targets."""
    folders: dict[str, list[Path]] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        folders.setdefault(target_of(wheel), []).append(wheel)
    for target, files in folders.items():
        folder = index / target / PROJECT
        folder.mkdir(parents=True, exist_ok=True)
        links = []
        for file in files:
            shutil.copy(file, folder)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            name = html.escape(file.name)
            links.append(f'<a href="{name}#sha256={digest}" data-requires-python="&gt;=3.11">{name}</a><br>')
        page = ["<!DOCTYPE html>", f"<html><head><title>{PROJECT} for {target}</title></head><body>", *links]
        (folder / "index.html").write_text("\n".join([*page, "</body></html>", ""]))
        (index / target / "index.html").write_text(f'<!DOCTYPE html>\n<a href="{PROJECT}/">{PROJECT}</a>\n')
    return list(folders)


if __name__ == "__main__":
    print("\n".join(make(Path(sys.argv[1]), Path(sys.argv[2]))))
