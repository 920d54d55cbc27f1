"""linear_a8 by AMX tiles, on any machine: the kernel's own source, with the tile instructions emulated."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import build_targets
from atlas.runtime import core
from atlas.targets.hardware import walk
from tests.csrc import cpu_kernels

SOURCE = build_targets.KERNELS / "cpu" / "linear_a8.cpp"


def test_tiles_give_the_bits_of_vectors(tmp_path: Path) -> None:
    """Every format, 1 to 49 rows, so tiles of 13 to 16; the emulation traps on a configuration that a CPU refuses."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    best = core.extension().cpu_levels()[0].replace("amx", "avx512vnni")  # beside tiles they are the same
    flags = [*next(level for level in walk(build_targets.KERNELS)["cpu"].levels if level.name == best).flags, "-O0"]
    levels = {"vectors": (flags, [SOURCE]), "tiles": ([*flags, "-DATLAS_AMX_EMULATED"], [SOURCE])}
    lines = cpu_kernels.run([cpu_kernels.build(tmp_path, [compiler], levels), *levels]).splitlines()
    emulation = b"5tilesEvE5state"  # its registers: a kernel that never came to its tiles would pass
    assert [emulation in (tmp_path / f"{name}-linear_a8.o").read_bytes() for name in levels] == [False, True]
    assert "tiles self-test: passes" in lines
    signatures = re.findall(r'^ATLAS_CPU_KERNEL\("(\S+)"', SOURCE.read_text(), re.MULTILINE)
    assert len(signatures) == 24
    for signature in signatures:
        assert f"tiles {signature}: right, same bits" in lines
