"""Builds the driver cpu_kernels.cpp with the CPU kernels of chosen levels, by any compiler."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from build_targets import ROOT

CORE = [ROOT / "csrc" / "cpu" / f"{name}.cpp" for name in ("features", "levels", "registry", "self_test")]
DRIVER = ROOT / "tests" / "csrc" / "cpu_kernels.cpp"


def build(folder: Path, compiler: Sequence[str], levels: Mapping[str, tuple[Sequence[str], Sequence[Path]]]) -> Path:
    """The program, in `folder`, beside its objects `LEVEL-FILE.o`.

    compiler: its command line up to the options that all files share.
    levels: name -> options and kernel files; names need not be those of HARDWARE.toml.
    """
    includes = [f"-I{ROOT / part}" for part in ("csrc", "kernels/cpu/include")]
    objects = []
    # The core first, then levels in their order, which should be from the lowest on: see CMakeLists.txt.
    for name, (flags, files) in {"": ([], [DRIVER, *CORE]), **levels}.items():
        for file in files:
            objects.append(folder / f"{name}-{file.stem}.o")
            level = [f'-DATLAS_CPU_LEVEL="{name}"'] if name else []
            options = ["-std=c++17", "-O2", "-Wno-psabi", *flags, *level, *includes]
            run([*compiler, *options, "-c", file, "-o", objects[-1]])
    program = folder / "cpu_kernels"
    run([*compiler, *objects, "-o", program])
    return program


def run(command: Sequence[str | Path]) -> str:
    """Its standard output; fails the test that calls it if the command does."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout
