"""Which device runs which image."""

from __future__ import annotations

import pytest

from atlas.build import architecture
from atlas.errors import BuildError

DEVICES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]


@pytest.mark.parametrize(
    ("arch", "devices"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)]),
        ("sm_89", [(8, 9)]),
        ("sm_90", [(9, 0)]),
        ("sm_90a", [(9, 0)]),
        ("sm_100f", [(10, 0), (10, 3)]),
        ("sm_103f", [(10, 3)]),
        ("sm_120", [(12, 0), (12, 1)]),
        ("sm_120a", [(12, 0)]),
        ("sm_120f", [(12, 0), (12, 1)]),
        ("sm_121a", [(12, 1)]),
        ("sm_121f", [(12, 1)]),
        ("compute_89", [(8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]),
        ("compute_90a", [(9, 0)]),
        ("compute_120f", [(12, 0), (12, 1)]),
    ],
)
def test_runs_on(arch: str, devices: list[tuple[int, int]]) -> None:
    assert [device for device in DEVICES if architecture.runs_on(arch, device) is None] == devices


@pytest.mark.parametrize(
    ("arch", "device", "reason"),
    [
        (
            "sm_120a",
            (12, 1),
            "sm_120a code runs on compute capability 12.0 only (suffix a), and this device is 12.1",
        ),
        ("sm_89", (8, 0), "sm_89 code runs on compute capability 8.x from 8.9 on, and this device is 8.0"),
        (
            "sm_120f",
            (9, 0),
            "sm_120f code runs on compute capability 12.0 and 12.1 only (suffix f: its family), and this device is 9.0",
        ),
        ("compute_90", (8, 9), "compute_90 PTX runs on compute capability 9.0 and later, and this device is 8.9"),
    ],
)
def test_the_reason_says_what_would_run(arch: str, device: tuple[int, int], reason: str) -> None:
    assert architecture.runs_on(arch, device) == reason


def test_the_ptx_of_an_architecture_keeps_its_suffix() -> None:
    assert architecture.parse("sm_121a").ptx == "compute_121a"
    assert architecture.parse("sm_80").ptx == "compute_80"


@pytest.mark.parametrize("arch", ["sm90", "sm_9", "sm_90b", "gfx942", ""])
def test_other_names_are_refused(arch: str) -> None:
    with pytest.raises(BuildError, match=f"'{arch}' is not an architecture name; accepted: sm_XY or compute_XY"):
        architecture.parse(arch)
