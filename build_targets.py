"""Builds targets: the PEP 517 hooks of this project, and the command CMake calls.

`pip install .` calls the hooks below; they add the CUDA compiler wheels to the build requirements
when a CUDA target is asked for, then hand over to scikit-build-core. CMake calls this file back:

    python build_targets.py --generate FOLDER     compile the selected targets; write manifest.json,
                                                  images.bin and targets.cmake
    python build_targets.py --list                show the targets the tree has, and those selected

Targets are selected by ATLAS_TARGET_HW, ATLAS_TARGET_MODEL and ATLAS_TARGET_QUANT.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Any, Protocol, cast

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from atlas.build import compile as compiler  # noqa: E402
from atlas.errors import AtlasError, BuildError  # noqa: E402
from atlas.targets import target as targets  # noqa: E402
from atlas.targets.hardware import Hardware, walk  # noqa: E402

KERNELS = ROOT / "kernels"


# ---- PEP 517 and PEP 660 hooks ------------------------------------------------------------------


class _Hooks(Protocol):
    """The hooks of scikit-build-core that this file hands over to."""

    def get_requires_for_build_wheel(self, config_settings: Any) -> list[str]: ...
    def get_requires_for_build_editable(self, config_settings: Any) -> list[str]: ...
    def get_requires_for_build_sdist(self, config_settings: Any) -> list[str]: ...
    def build_wheel(self, wheel_directory: str, config_settings: Any, metadata_directory: str | None) -> str: ...
    def build_editable(self, wheel_directory: str, config_settings: Any, metadata_directory: str | None) -> str: ...
    def build_sdist(self, sdist_directory: str, config_settings: Any) -> str: ...


def _scikit_build() -> _Hooks:
    """Imported only inside hooks: the commands below need no build environment."""
    return cast(_Hooks, importlib.import_module("scikit_build_core.build"))


def _requirements(base: list[str]) -> list[str]:
    """`base`, plus the CUDA compiler wheels where a CUDA target is selected."""
    if sys.platform == "win32":
        raise SystemExit("atlas: Windows is supported through WSL2: install Atlas inside a WSL2 distribution")
    try:
        selection = targets.select(KERNELS, os.environ)
    except AtlasError as error:
        raise SystemExit(f"atlas: {error}") from None
    if not selection.needs_cuda():
        return base
    from atlas.build.toolchain import CUDA_REQUIREMENTS

    return [*base, *CUDA_REQUIREMENTS]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _requirements(_scikit_build().get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _requirements(_scikit_build().get_requires_for_build_editable(config_settings))


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return _scikit_build().get_requires_for_build_sdist(config_settings)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    return _scikit_build().build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    return _scikit_build().build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    return _scikit_build().build_sdist(sdist_directory, config_settings)


# ---- commands -----------------------------------------------------------------------------------


def cpu_levels(hardware: Hardware, machine: str) -> list[tuple[str, tuple[str, ...]]]:
    """(level, compiler flags) of the CPU kernels that `machine` (as `uname -m` says) can have."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    levels = [(level.name, level.flags) for level in hardware.levels if level.machine in (machine, "any")]
    if not levels:
        raise BuildError("kernels/cpu/HARDWARE.toml", f"no level for machine {machine}", "a level with machine 'any'")
    return levels


def generate(folder: Path, machine: str, jobs: int) -> None:
    """Compile the selected targets into `folder` for CMake to embed."""
    selection = targets.select(KERNELS, os.environ)
    for note in selection.notes:
        print(f"atlas: {note}")
    manifest, blob = compiler.build(KERNELS, selection.targets, jobs, lambda text: print(f"atlas: {text}"))
    compiler.write(folder, manifest, blob)
    cpu = next(target.hardware for target in selection.targets if target.hardware.kind == "cpu")
    files = sorted(
        {(KERNELS / kernel.source).as_posix() for s in manifest.sets if s.kind == "cpu" for kernel in s.kernels}
    )
    levels = cpu_levels(cpu, machine)
    lines = [
        f"set(ATLAS_CPU_SOURCES {' '.join(files)})",
        f"set(ATLAS_CPU_LEVELS {' '.join(name for name, _ in levels)})",
        *(f"set(ATLAS_CPU_FLAGS_{name} {' '.join(flags)})" for name, flags in levels),
    ]
    text = "\n".join(lines) + "\n"
    output = folder / "targets.cmake"
    if not output.exists() or output.read_text() != text:
        output.write_text(text)
    _table(manifest)


def _table(manifest: Any) -> None:
    """One line per device kernel: the figures that decide how well it can run."""
    for kernel_set in manifest.sets:
        if kernel_set.kind == "cpu":
            print(f"atlas: {kernel_set.name}: {len(kernel_set.kernels)} kernels, compiled by the host compiler")
            continue
        print(f"atlas: {kernel_set.name} ({kernel_set.arch})")
        print(f"  {'kernel':<88}{'regs':>5}{'spill':>6}{'smem':>7}{'bytes':>8}")
        for kernel in kernel_set.kernels:
            size = manifest.images[kernel.image].size
            shared = kernel.shared + kernel.static_shared
            print(f"  {kernel.name:<88}{kernel.registers:>5}{kernel.spills:>6}{shared:>7}{size:>8}")


def list_targets() -> None:
    """Print hardware, models, and the selection the environment makes."""
    for name, hardware in walk(KERNELS).items():
        kind = "abstract" if hardware.abstract else hardware.arch or "host compiler"
        print(f"{name:<10} {kind:<14} quants: {', '.join(hardware.quants) or '-':<10} {hardware.description}")
    print("models:   ", ", ".join(targets.models(KERNELS)))
    selection = targets.select(KERNELS, os.environ)
    for note in selection.notes:
        print(note)
    print("selected: ", ", ".join(target.name for target in selection.targets))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generate", type=Path, metavar="FOLDER", help="compile the selected targets into FOLDER")
    parser.add_argument("--list", action="store_true", help="show the targets of the tree and the selection")
    parser.add_argument("--machine", default=platform.machine(), help="host machine, as `uname -m` says it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="kernels compiled at a time")
    arguments = parser.parse_args()
    try:
        if arguments.generate:
            generate(arguments.generate, arguments.machine, arguments.jobs)
        elif arguments.list:
            list_targets()
        else:
            parser.print_help()
    except AtlasError as error:
        sys.exit(f"atlas: {error}")


if __name__ == "__main__":
    main()
