"""What the process may use of its host, read from made-up control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atlas.runtime import host


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process in /pod/box of every tree."""
    read_text = Path.read_text
    lines = "4:memory:/pod/box\n3:cpu,cpuacct:/pod/box\n0::/pod/box\n"

    def fake(path: Path, *arguments: object, **options: object) -> str:
        return lines if str(path) == "/proc/self/cgroup" else read_text(path)

    monkeypatch.setattr(Path, "read_text", fake)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"pod/cpu.max": "50000 100000"}, 0.5),
        ({"pod/box/cpu.max": "400000 100000", "pod/cpu.max": "300000 100000"}, 3.0),
        ({"pod/box/cpu.max": "max 100000"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1.0),
        ({"cpu/pod/box/cpu.cfs_quota_us": "250000", "cpu/pod/box/cpu.cfs_period_us": "100000"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_tightest_quota_on_the_way_up_counts(
    tmp_path: Path, group: None, files: dict[str, str], quota: float | None
) -> None:
    root = write(tmp_path, files)
    assert host.cpu_quota(root) == quota
    affinity = len(os.sched_getaffinity(0))
    assert host.allowed_cores(root) == (affinity if quota is None else min(affinity, max(1, int(quota))))


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 8 << 30),
        ({"memory.max": "max"}, 8 << 30),
        ({"pod/memory.max": str(3 << 30), "pod/memory.current": str(1 << 30)}, 2 << 30),
        (
            {
                "pod/box/memory.max": str(3 << 30),
                "pod/box/memory.current": str(2 << 30),
                "pod/box/memory.stat": f"anon 5\ninactive_file {1 << 30}\n",
            },
            2 << 30,
        ),
        ({"pod/memory.max": str(1 << 30), "pod/box/memory.max": str(2 << 30)}, 1 << 30),
        ({"memory/pod/memory.limit_in_bytes": str(1 << 30), "memory/pod/memory.usage_in_bytes": "5"}, (1 << 30) - 5),
        ({"memory.max": "100", "memory.current": "500"}, 0),
    ],
)
def test_memory_is_what_every_group_leaves(tmp_path: Path, group: None, files: dict[str, str], available: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable: {(8 << 30) // 1024} kB\n")
    assert host.available_memory(meminfo, write(tmp_path / "groups", files)) == available
