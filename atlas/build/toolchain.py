"""The CUDA compiler, found inside pip wheels: no toolkit, no `nvcc`, nothing on PATH.

Two steps make a kernel: NVRTC (a library) turns CUDA C++ into PTX, `ptxas` (a program) turns PTX into
a device image. Both, and the headers they need, are in four wheels that a machine without a GPU can
install as well. Standard library only: this runs in an isolated build environment.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from pathlib import Path

from atlas.errors import BuildError

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


@functools.cache
def find() -> Toolchain:
    """The toolchain of this environment.

    Raises:
        BuildError: a wheel is missing or holds not what it should; the text has the pip command.
    """
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
