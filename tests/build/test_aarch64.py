"""CPU kernels and core on aarch64, at each of its levels: compiled by a cross compiler, run by an emulator.

pip install ziglang; apt-get install qemu-user g++-aarch64-linux-gnu; pytest -m aarch64
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import build_targets
from atlas.targets.hardware import walk
from tests.csrc import cpu_kernels

pytestmark = pytest.mark.aarch64

FILES = sorted((build_targets.KERNELS / "cpu").glob("*.cpp"))
LEVELS = build_targets.cpu_levels(walk(build_targets.KERNELS)["cpu"], "aarch64", FILES)
CORE = sorted((build_targets.ROOT / "csrc" / "cpu").glob("*.cpp"))
_SOURCES = "\n".join(file.read_text() for file in FILES)


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


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver with every kernel of every level; and linear_a8 as a CPU with dotprod but no i8mm has it (the
    `portable` of Apple's compiler)."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no cross compiler: apt-get install g++-aarch64-linux-gnu")
    levels = {level.name: (level.flags, files) for level, files in reversed(LEVELS)}
    dotprod = [flag.replace("+i8mm+bf16", "") for flag in levels["i8mm"][0]]
    assert dotprod != levels["i8mm"][0]
    levels["dotprod"] = (dotprod, [file for file in FILES if file.stem == "linear_a8"])
    command = [compiler, "-static", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    return cpu_kernels.build(tmp_path_factory.mktemp("aarch64"), command, levels)


def emulated(cpu: str, program: Path, *levels: str) -> str:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("no emulator: apt-get install qemu-user")
    return cpu_kernels.run([emulator, "-cpu", cpu, program, *levels])


def test_levels_compute_what_they_should(program: Path) -> None:
    """The core's self-test, and linears over all formats against plain loops; integer sums are exact, so every level
    has the same bits."""
    lines = emulated("max", program, "portable", "i8mm", "dotprod").splitlines()
    assert [line for line in lines if "self-test" in line] == [
        f"{level} self-test: passes" for level in ("portable", "i8mm", "dotprod")
    ]
    counts = {level: sum(line.startswith(f"{level} linear") for line in lines) for level in ("portable", "i8mm")}
    declared = re.findall(r'^ATLAS_CPU_KERNEL\("(linear\w*)\.', _SOURCES, re.MULTILINE)
    assert counts == {"portable": len(declared), "i8mm": declared.count("linear_a8")}
    for line in lines:
        if line.startswith(("i8mm linear_a8", "dotprod linear_a8")):
            assert line.endswith(": right, same bits")


@pytest.mark.parametrize(("cpu", "found"), [("max", "usable"), ("cortex-a53", "needs ASIMDDP, I8MM and BF16")])
def test_what_a_cpu_lacks_is_named(program: Path, cpu: str, found: str) -> None:
    assert emulated(cpu, program).splitlines() == [f"i8mm: {found}", "portable: usable"]
