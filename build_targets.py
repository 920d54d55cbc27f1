"""Builds targets: the PEP 517 hooks of this project, and its commands on the kernel tree.

`pip install .` calls the hooks below; they add the CUDA compiler wheels to the build requirements
when a CUDA target is asked for, then hand over to scikit-build-core. The commands, of which --list, --plan,
--matrix, --build and --report print JSON with --json:

    --list            hardware, models and quants, with the status of every target, and what is selected
    --plan            for the selected targets every kernel, the file that serves it and why; compiles nothing
    --matrix          a CI matrix: one wheel for each target that has kernels (JSON)
    --build [FOLDER]  compile the selected targets into FOLDER; without it, rebuild this Python's editable install
    --report [FOLDER] registers, spills, shared memory, bytes and seconds of the build in FOLDER, or the newest here
    --generate FOLDER what CMake calls: manifest.json, images.bin and targets.cmake

Targets are selected by ATLAS_TARGET_HW, ATLAS_TARGET_MODEL and ATLAS_TARGET_QUANT: names, comma lists or `*`
patterns. Unset, the hardware is this machine's GPU and `cpu`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from atlas.build import compile as compiler  # noqa: E402
from atlas.build import kernel_file, report  # noqa: E402
from atlas.build.manifest import Manifest  # noqa: E402
from atlas.errors import AtlasError, BuildError  # noqa: E402
from atlas.targets import inplace, listing  # noqa: E402
from atlas.targets import target as targets  # noqa: E402
from atlas.targets.hardware import Hardware, Level  # noqa: E402

KERNELS = ROOT / "kernels"


# ---- PEP 517 and PEP 660 hooks ------------------------------------------------------------------


class _Hooks(Protocol):
    """The hooks of scikit-build-core that this file hands over to."""

    def get_requires_for_build_wheel(self, config_settings: Any) -> list[str]: ...
    def get_requires_for_build_editable(self, config_settings: Any) -> list[str]: ...
    def get_requires_for_build_sdist(self, config_settings: Any) -> list[str]: ...
    def prepare_metadata_for_build_wheel(self, metadata_directory: str, config_settings: Any) -> str: ...
    def prepare_metadata_for_build_editable(self, metadata_directory: str, config_settings: Any) -> str: ...
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
    _check_compiler()
    try:
        selection = targets.select(KERNELS, os.environ)
    except AtlasError as error:
        raise SystemExit(f"atlas: {error}") from None
    # An installed nvcc brings headers of its own, so the wheels would be downloaded for nothing.
    if not selection.needs_cuda() or os.environ.get("ATLAS_CUDA_COMPILER", "nvrtc") != "nvrtc":
        return base
    from atlas.build.toolchain import CUDA_REQUIREMENTS

    return [*base, *CUDA_REQUIREMENTS]


def _check_compiler() -> None:
    """Say at once what CMake would say at length, and what to do."""
    if os.environ.keys() & {"CMAKE_ARGS", "CMAKE_TOOLCHAIN_FILE"}:  # these may name one
        return
    names = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    fix = "on Debian or Ubuntu: apt install g++ python3-dev"
    if not any(map(shutil.which, names)):
        raise SystemExit(f"atlas: no C++17 compiler ({', '.join(names)}); {fix}; another is named by the variable CXX")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise SystemExit(f"atlas: Python's headers are not installed ({header}); {fix}")


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _requirements(_scikit_build().get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _requirements(_scikit_build().get_requires_for_build_editable(config_settings))


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return _scikit_build().get_requires_for_build_sdist(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    return _scikit_build().prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Any = None) -> str:
    return _scikit_build().prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    return _scikit_build().build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    return _scikit_build().build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    return _scikit_build().build_sdist(sdist_directory, config_settings)


# ---- commands -----------------------------------------------------------------------------------


def cpu_levels(hardware: Hardware, machine: str, files: Sequence[Path]) -> list[tuple[Level, list[Path]]]:
    """Levels that `machine` (as `uname -m` says) can have, and the kernel files of `files` compiled for each.

    Raises:
        BuildError: a file that asks for a level that does not exist, or is not compiled on request.
    """
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    levels = [level for level in hardware.levels if level.machine in (machine, "any")]
    if not levels:
        raise BuildError("kernels/cpu/HARDWARE.toml", f"no level for machine {machine}", "a level with machine 'any'")
    requested = {file: kernel_file.declaration(file).also for file in files}
    on_request = [level.name for level in hardware.levels if level.on_request]
    for file, names in requested.items():
        if unknown := [name for name in names if name not in on_request]:
            raise BuildError(str(file), f"[levels] also names {unknown[0]!r}", ", ".join(on_request))
    return [
        (level, compiled)
        for level in levels
        if (compiled := [file for file in files if not level.on_request or level.name in requested[file]])
    ]


def say(text: str) -> None:
    """A remark: on stderr, so that --json leaves nothing but JSON on stdout."""
    print(f"atlas: {text}", file=sys.stderr, flush=True)


def compile_selected(folder: Path, jobs: int) -> tuple[Manifest, targets.Selection]:
    """Compile the selected targets into `folder`: manifest.json, images.bin and the compile times."""
    selection = targets.select(KERNELS, os.environ)
    for note in selection.notes:
        say(note)
    manifest, blob = compiler.build(KERNELS, selection.targets, jobs, say)
    compiler.write(folder, manifest, blob)
    report.write_seconds(folder, report.seconds_of(manifest))
    return manifest, selection


def generate(folder: Path, machine: str, jobs: int) -> None:
    """Compile the selected targets into `folder` for CMake to embed."""
    manifest, selection = compile_selected(folder, jobs)
    cpu = next(target.hardware for target in selection.targets if target.hardware.kind == "cpu")
    files = sorted({KERNELS / kernel.source for s in manifest.sets if s.kind == "cpu" for kernel in s.kernels})
    levels = cpu_levels(cpu, machine, files)
    lines = [f"set(ATLAS_CPU_LEVELS {' '.join(level.name for level, _ in levels)})"]
    for level, compiled in levels:
        lines.append(f"set(ATLAS_CPU_SOURCES_{level.name} {' '.join(file.as_posix() for file in compiled)})")
        lines.append(f"set(ATLAS_CPU_FLAGS_{level.name} {' '.join(level.flags)})")
    text = "\n".join(lines) + "\n"
    output = folder / "targets.cmake"
    if not output.exists() or output.read_text() != text:
        output.write_text(text)
    print(report.text(report.read(folder)))


def build(folder: Path | None, jobs: int, as_json: bool) -> None:
    """Compile kernel sets into `folder`, or rebuild the editable install."""
    if folder is None:
        command, environment = inplace.command(ROOT, os.environ, inplace.editable_root(), inplace.recorded_selection())
        chosen = " ".join(f"{name}={environment[name]}" for name in targets.VARIABLES if environment.get(name))
        say(f"rebuilding the editable install of {ROOT} with {chosen or 'no ATLAS_TARGET_* variable'}")
        code = subprocess.run(command, env=environment, check=False, stdout=sys.stderr).returncode
        if code:
            raise BuildError(" ".join(command), f"failed with exit code {code}; the reason stands above")
        folder = report.latest(ROOT)
    else:
        compile_selected(folder, jobs)
    show(report.read(folder), report.text, as_json)


def show(document: Any, text: Callable[[Any], str], as_json: bool) -> None:
    print(json.dumps(document, indent=1) if as_json else text(document), flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_mutually_exclusive_group(required=True)
    commands.add_argument("--list", action="store_true", help="the targets of the tree and the selection")
    commands.add_argument("--plan", action="store_true", help="which file serves each kernel of the selection")
    commands.add_argument("--matrix", action="store_true", help="JSON for CI: one wheel per target with kernels")
    commands.add_argument("--build", type=Path, nargs="?", const="", metavar="FOLDER", help="compile the selection")
    commands.add_argument("--report", type=Path, nargs="?", const="", metavar="FOLDER", help="figures of a build")
    commands.add_argument("--generate", type=Path, metavar="FOLDER", help="compile the selection for CMake")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--machine", default=platform.machine(), help="host machine, as `uname -m` says it")
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=os.cpu_count() or 1,
        help="kernels compiled at a time (default: %(default)s, the cores)",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.generate:
            generate(arguments.generate, arguments.machine, arguments.jobs)
        elif arguments.list:
            show(listing.tree(KERNELS, os.environ), listing.tree_text, arguments.json)
        elif arguments.plan:
            selection = targets.select(KERNELS, os.environ)
            for note in selection.notes:
                say(note)
            show(listing.plan(KERNELS, selection.targets), listing.plan_text, arguments.json)
        elif arguments.matrix:
            print(json.dumps(listing.matrix(KERNELS, os.environ)))
        elif arguments.build is not None:
            build(arguments.build if arguments.build.parts else None, arguments.jobs, arguments.json)
        else:
            folder = arguments.report if arguments.report.parts else report.latest(ROOT)
            say(f"report of {folder}")
            show(report.read(folder), report.text, arguments.json)
    except AtlasError as error:
        sys.exit(f"atlas: {error}")
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; what Python still holds must not go there either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
