"""CPU kernels and core compile for aarch64, at each of its levels, with a cross compiler from a wheel.

pip install ziglang && pytest -m aarch64
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import build_targets
from atlas.targets.hardware import walk

pytestmark = pytest.mark.aarch64

FILES = sorted((build_targets.KERNELS / "cpu").glob("*.cpp"))
LEVELS = build_targets.cpu_levels(walk(build_targets.KERNELS)["cpu"], "aarch64", FILES)
CORE = sorted((build_targets.ROOT / "csrc" / "cpu").glob("*.cpp"))


def compiles(source: Path, out: Path, *flags: str) -> None:
    pytest.importorskip("ziglang")
    includes = [f"-I{build_targets.ROOT / folder}" for folder in ("csrc", "kernels/cpu/include")]
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu", "-std=c++17", "-O2"]
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    done = subprocess.run(
        [*command, *warnings, *flags, *includes, "-c", source, "-o", out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert out.read_bytes()[18:20] == b"\xb7\x00"  # EM_AARCH64


@pytest.mark.parametrize(
    ("level", "flags", "file"),
    [
        pytest.param(level.name, level.flags, file, id=f"{level.name}-{file.stem}")
        for level, files in LEVELS
        for file in files
    ],
)
def test_a_kernel_file_compiles(tmp_path: Path, level: str, flags: tuple[str, ...], file: Path) -> None:
    # zig names a baseline by -mcpu.
    named = [flag.replace("-march=armv8.2-a", "-mcpu=generic") for flag in flags]
    compiles(file, tmp_path / "kernel.o", *named, f'-DATLAS_CPU_LEVEL="{level}"')


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.stem)
def test_a_core_file_compiles(tmp_path: Path, file: Path) -> None:
    compiles(file, tmp_path / "core.o")
