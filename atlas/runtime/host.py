"""What this process may use of its host: cores and memory, after affinity and control groups (v2 and v1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def allowed_cores(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Cores of this process's affinity, cut to its CPU quota; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = cpu_quota(cgroup_root)
    return cores if quota is None else min(cores, max(1, int(quota)))


def cpu_quota(cgroup_root: Path = CGROUP_ROOT) -> float | None:
    """The tightest CPU quota on the way from this process's group to the root, in cores; None without one."""
    quotas = []
    for group in _groups(cgroup_root, "cpu"):
        limit, period = _words(group / "cpu.max") or ["max", "1"]
        if limit != "max":
            quotas.append(int(limit) / int(period))
        v1 = [_number(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if v1[0] is not None and v1[1] and v1[0] > 0:
            quotas.append(v1[0] / v1[1])
    return min(quotas, default=None)


def available_memory(meminfo: Path = MEMINFO, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Bytes free or reclaimable: the machine's, and what each group on the way to the root has left."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = 1024 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    for group in _groups(cgroup_root, "memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(group / limit_file)
            if limit is not None:
                # The group's page cache counts as used but is given back on demand.
                cache = _statistic(group / "memory.stat", ("inactive_file", "total_inactive_file"))
                used = max(0, (_number(group / usage_file) or 0) - cache)
                available = min(available, max(0, limit - used))
    return available


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and of all above it: v2's one tree, then v1's tree of `controller`."""
    paths = {"": "", controller: ""}
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                if name in paths:
                    paths[name] = path.strip("/")
    except (OSError, ValueError):
        pass
    for top, path in ((root, paths[""]), (root / controller, paths[controller])):
        folder = top / path
        for candidate in (folder, *folder.parents):
            if candidate.is_relative_to(top):
                yield candidate


def _words(path: Path) -> list[str] | None:
    """The two words of a cpu.max, or None."""
    try:
        words = path.read_text().split()
    except OSError:
        return None
    return words if len(words) == 2 and words[1].isdecimal() and (words[0] == "max" or words[0].isdecimal()) else None


def _number(path: Path) -> int | None:
    """The integer in a file; None where there is no file or no integer ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, names: tuple[str, ...]) -> int:
    """The first of `names` in a memory.stat, 0 if none is there."""
    try:
        pairs = dict(line.split() for line in path.read_text().splitlines())
        return next((int(pairs[name]) for name in names if name in pairs), 0)
    except (OSError, ValueError):
        return 0
