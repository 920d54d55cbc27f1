"""The CUDA compiler: by default inside pip wheels, with no toolkit and nothing on PATH.

Two steps make a kernel: NVRTC (a library) turns CUDA C++ into PTX, `ptxas` (a program) turns PTX into
a device image. Both, and the headers they need, are in four wheels that a machine without a GPU can
install as well. `ATLAS_CUDA_COMPILER` names an alternative:

| value | compiler |
| --- | --- |
| unset | the pinned CUDA 12 wheels |
| `nvrtc` | the newest NVRTC among the installed wheels, CUDA 12 or 13, with the ptxas of the same CUDA |
| `nvcc` | the `nvcc` on PATH |
| a path | that `nvcc` |

Standard library only: this runs in an isolated build environment.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

from atlas.errors import BuildError

VARIABLE = "ATLAS_CUDA_COMPILER"

CUDA_REQUIREMENTS: tuple[str, ...] = (
    "nvidia-cuda-nvrtc-cu12>=12.9.86,<12.10",
    "nvidia-cuda-nvcc-cu12>=12.9.86,<12.10",
    "nvidia-cuda-runtime-cu12>=12.9.79,<12.10",
    "nvidia-cuda-cccl-cu12>=12.9.27,<12.10",
)
"""What a build environment needs for a CUDA target. One minor version: NVRTC's PTX must be no newer
than what ptxas reads, and 12.9 is the first that knows sm_121a."""

ARCHITECTURES: tuple[str, ...] = ("sm_80", "sm_89", "sm_90a", "sm_120a", "sm_121a")
"""Architectures that the kernels are written for. An `a` image runs on exactly that device family."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """Where the compiler's parts lie.

    nvrtc: the compiler library; nvrtc_builtins: the library it opens by name, so it is opened first.
    includes: header folders, searched in order. version: names both compilers, for manifests and
    cache keys; it holds no path.
    """

    nvrtc: Path
    nvrtc_builtins: Path
    ptxas: Path
    includes: tuple[Path, ...]
    version: str


def check_arch(arch: str) -> str:
    """`arch`, if Atlas compiles for it. Raises BuildError otherwise."""
    if arch not in ARCHITECTURES:
        raise BuildError("arch", f"{arch!r} is not an architecture Atlas compiles for", ", ".join(ARCHITECTURES))
    return arch


@dataclasses.dataclass(frozen=True)
class Nvcc:
    """An nvcc. version: as it says itself, for manifests and cache keys."""

    path: Path
    version: str


def find() -> Toolchain | Nvcc:
    """The compiler that `ATLAS_CUDA_COMPILER` asks for.

    Raises:
        BuildError: it is not there, or a wheel is missing or holds not what it should; the text has
            the pip command.
    """
    return _find(os.environ.get(VARIABLE, ""), os.environ.get("PATH", ""))


def wheels() -> Toolchain:
    """`find()`, for those that need NVRTC and ptxas themselves."""
    found = find()
    if isinstance(found, Nvcc):
        raise BuildError(VARIABLE, f"{found.path} is an nvcc", "unset, or 'nvrtc'")
    return found


@functools.cache
def _find(choice: str, search_path: str) -> Toolchain | Nvcc:
    if choice == "":
        return _pinned()
    if choice == "nvrtc":
        return _newest()
    if choice == "nvcc":
        found = shutil.which("nvcc", path=search_path)
        if found is None:
            raise BuildError(VARIABLE, "'nvcc', and PATH has none", "unset, 'nvrtc', 'nvcc' or the path of an nvcc")
        return _nvcc(Path(found))
    if os.sep in choice:
        return _nvcc(Path(choice).absolute())  # it runs in a folder of its own
    raise BuildError(VARIABLE, repr(choice), "unset, 'nvrtc', 'nvcc' or the path of an nvcc")


def _nvcc(path: Path) -> Nvcc:
    try:
        done = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(VARIABLE, f"{path} could not be run ({error})", "the path of an nvcc") from None
    version = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    if done.returncode != 0 or not version:
        raise BuildError(VARIABLE, f"{path} does not say a version when asked --version", "the path of an nvcc")
    return Nvcc(path, f"nvcc {version.group(1)}")


def _pinned() -> Toolchain:
    """The wheels of CUDA_REQUIREMENTS, each with a folder of its own under `nvidia/`."""
    nvrtc_version, nvrtc_root = _wheel("nvidia-cuda-nvrtc-cu12", "cuda_nvrtc")
    nvcc_version, nvcc_root = _wheel("nvidia-cuda-nvcc-cu12", "cuda_nvcc")
    _, runtime_root = _wheel("nvidia-cuda-runtime-cu12", "cuda_runtime")
    _, cccl_root = _wheel("nvidia-cuda-cccl-cu12", "cuda_cccl")
    return Toolchain(
        nvrtc=_one(nvrtc_root, "lib/libnvrtc.so.*", "nvidia-cuda-nvrtc-cu12"),
        nvrtc_builtins=_one(nvrtc_root, "lib/libnvrtc-builtins.so.*", "nvidia-cuda-nvrtc-cu12"),
        ptxas=_one(nvcc_root, "bin/ptxas", "nvidia-cuda-nvcc-cu12"),
        includes=(
            _one(runtime_root, "include/cuda_bf16.h", "nvidia-cuda-runtime-cu12").parent,
            _one(cccl_root, "include/nv/target", "nvidia-cuda-cccl-cu12").parent.parent,
        ),
        version=f"nvrtc {nvrtc_version}, ptxas {nvcc_version}",
    )


def _newest() -> Toolchain:
    """CUDA 13 wheels, which share one folder and carry no suffix; the pinned ones where there are none."""
    try:
        nvrtc = importlib.metadata.distribution("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        return _pinned()
    folder = f"nvidia/cu{nvrtc.version.split('.')[0]}"
    root = Path(str(nvrtc.locate_file(folder)))
    parts = ("nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cuda-crt")
    versions = {}
    for part in parts:
        try:
            versions[part] = importlib.metadata.version(part)
        except importlib.metadata.PackageNotFoundError:
            raise BuildError(
                VARIABLE,
                f"'nvrtc' found nvidia-cuda-nvrtc {nvrtc.version}, but not {part}",
                fix=f"run: pip install {' '.join(parts)}",
            ) from None
    if _minor(versions["nvidia-cuda-nvcc"]) < _minor(nvrtc.version):
        raise BuildError(
            VARIABLE,
            f"'nvrtc' found NVRTC {nvrtc.version} with the older ptxas {versions['nvidia-cuda-nvcc']}",
            "a ptxas at least as new, which can read NVRTC's PTX",
            f"run: pip install 'nvidia-cuda-nvcc>={nvrtc.version}'",
        )
    return Toolchain(
        nvrtc=_one(root, "lib/libnvrtc.so.*", "nvidia-cuda-nvrtc"),
        nvrtc_builtins=_one(root, "lib/libnvrtc-builtins.so.*", "nvidia-cuda-nvrtc"),
        ptxas=_one(root, "bin/ptxas", "nvidia-cuda-nvcc"),
        includes=(
            _one(root, "include/cuda_bf16.h", "nvidia-cuda-runtime").parent,
            _one(root, "include/nv/target", "nvidia-cuda-cccl").parent.parent,
        ),
        version=f"nvrtc {nvrtc.version}, ptxas {versions['nvidia-cuda-nvcc']}",
    )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def install_command() -> str:
    """The pip command that installs every wheel of the toolchain."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in CUDA_REQUIREMENTS)


def _wheel(distribution: str, package: str) -> tuple[str, Path]:
    """Version and folder of an installed wheel's `nvidia/<package>`, wherever sys.path has it."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(
            "CUDA toolchain", f"the wheel {distribution} is not installed", fix=f"run: {install_command()}"
        ) from None
    return found.version, Path(str(found.locate_file(f"nvidia/{package}")))


def _one(root: Path, pattern: str, distribution: str) -> Path:
    """The first file that matches; the wheels also hold `.alt` libraries, which are left out."""
    found = sorted(path for path in root.glob(pattern) if ".alt." not in path.name)
    if not found:
        raise BuildError(
            "CUDA toolchain",
            f"the wheel {distribution} holds no {pattern}",
            fix=f"reinstall it: {install_command()}",
        )
    return found[0]
