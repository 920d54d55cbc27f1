#!/usr/bin/env python3
"""Size on disk of Atlas and everything it needs at run time, by distribution; fails above the limit.

.ci/sizes.py             the environment of this Python: run-time requirements alone, without pip and setuptools
.ci/sizes.py FILE.whl    size of wheels
"""

import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ENVIRONMENT_LIMIT_MB = 200
WHEEL_LIMIT_MB = 10


def needed(name: str) -> set[str]:
    """Names of `name` and of every distribution it requires here, without extras unless a requirement names one."""
    found: set[str] = set()
    pending = [Requirement(name)]
    while pending:
        requirement = pending.pop()
        key = canonicalize_name(requirement.name)
        marked = f"{key}[{','.join(sorted(requirement.extras))}]"
        if marked in found:
            continue
        found.add(marked)
        for text in importlib.metadata.requires(key) or []:
            child = Requirement(text)
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                pending.append(child)
    return {marked.partition("[")[0] for marked in found}


def size_on_disk(name: str) -> int:
    """Bytes that the files of a distribution occupy, byte code included."""
    total = 0
    for file in importlib.metadata.files(name) or []:
        path = Path(str(file.locate()))
        if path.is_file():
            total += path.stat().st_blocks * 512
    return total


def environment() -> int:
    sizes = {name: size_on_disk(name) for name in needed("atlas-infer")}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:8.1f} MB  {name} {importlib.metadata.version(name)}")
    total = sum(sizes.values()) / 1e6
    print(f"{total:8.1f} MB  in all, of at most {ENVIRONMENT_LIMIT_MB}")
    return int(total > ENVIRONMENT_LIMIT_MB)


def wheels(paths: list[str]) -> int:
    worst = 0.0
    for path in paths:
        size = Path(path).stat().st_size / 1e6
        print(f"{size:8.1f} MB  {Path(path).name}, of at most {WHEEL_LIMIT_MB}")
        worst = max(worst, size)
    return int(worst > WHEEL_LIMIT_MB)


if __name__ == "__main__":
    sys.exit(wheels(sys.argv[1:]) if sys.argv[1:] else environment())
