#!/usr/bin/env python3
"""Holds a wheel's platform tag to what its extension needs: `.ci/glibc.py FILE.whl ...`.

A tag manylinux_2_X promises glibc 2.X and the libstdc++ of that time; `objdump -T` says which versions the
symbols ask for. A linux_* tag promises nothing, so nothing is held against it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LEGACY = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}

GLIBCXX = {
    (2, 5): (3, 4, 8),
    (2, 12): (3, 4, 13),
    (2, 17): (3, 4, 19),
    (2, 24): (3, 4, 22),
    (2, 27): (3, 4, 24),
    (2, 31): (3, 4, 28),
    (2, 34): (3, 4, 29),
    (2, 35): (3, 4, 30),
    (2, 39): (3, 4, 33),
}
"""Newest GLIBCXX_ that a manylinux tag allows, from this glibc version on (auditwheel's policies)."""

Version = tuple[int, ...]


def needed(symbols: str) -> dict[str, Version]:
    """Highest version of GLIBC and GLIBCXX in the output of `objdump -T`.

    Raises:
        ValueError: a symbol of a newer C library without a version: no tag says that it is needed.
    """
    highest: dict[str, Version] = {}
    for line in symbols.splitlines():
        if "*UND*" not in line:
            continue
        if "__isoc23_" in line and "GLIBC_" not in line:
            raise ValueError(f"unversioned symbol of glibc 2.38: {line.split()[-1]}")
        for library, text in re.findall(r"\b(GLIBC|GLIBCXX)_([0-9.]+)", line):
            version = tuple(map(int, text.split(".")))
            highest[library] = max(highest.get(library, ()), version)
    return highest


def promised(tag: str) -> Version | None:
    """The glibc that a platform tag promises, the oldest of a compressed set; None where it promises nothing."""
    versions: list[Version] = []
    for part in tag.split("."):
        if match := re.match(r"manylinux_(\d+)_(\d+)_", part):
            versions.append((int(match[1]), int(match[2])))
        versions += [version for name, version in LEGACY.items() if part.startswith(f"{name}_")]
    return min(versions) if versions else None


def broken_promise(tag: str, symbols: str) -> str:
    """What the symbols need and the tag does not promise; empty if all is well."""
    found, glibc = needed(symbols), promised(tag)
    if glibc is None:
        return ""
    if (need := found.get("GLIBC", ())) > glibc:
        return f"needs GLIBC_{_text(need)}, the tag {tag} promises {_text(glibc)}"
    allowed = max((cxx for base, cxx in GLIBCXX.items() if base <= glibc), default=(3, 4, 8))
    if (need := found.get("GLIBCXX", ())) > allowed:
        return f"needs GLIBCXX_{_text(need)}, the tag {tag} promises {_text(allowed)}"
    return ""


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def check(wheel: Path) -> str:
    """What is wrong with the wheel; empty if nothing. Prints what each library needs."""
    tag = wheel.stem.split("-")[-1]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".so" not in Path(name).suffixes:
                continue
            file = archive.extract(name, folder)
            symbols = subprocess.run(["objdump", "-T", file], check=True, capture_output=True, text=True).stdout
            try:
                print(f"{name}: {', '.join(f'{k}_{_text(v)}' for k, v in needed(symbols).items())}; tag {tag}")
                if fault := broken_promise(tag, symbols):
                    return f"{name} {fault}"
            except ValueError as error:
                return f"{name}: {error}"
    return ""


if __name__ == "__main__":
    faults = [f"{path}: {fault}" for path in sys.argv[1:] if (fault := check(Path(path)))]
    sys.exit("\n".join(faults) if faults else 0)
