"""One CUDA kernel instance: source and instance header -> PTX -> device image, checked."""

from __future__ import annotations

from collections.abc import Mapping

from atlas.build import nvrtc, ptxas, toolchain
from atlas.build.compile import Compiled
from atlas.build.instance import HEADER_NAME as INSTANCE_HEADER
from atlas.build.instance import instance_header
from atlas.errors import BuildError

OPTIONS: tuple[str, ...] = ("--std=c++17", "--define-macro=NDEBUG")
"""NVRTC options beside the architecture; part of cache keys. No fast-math: division, square root and
denormals are IEEE, because ops are compared with their NumPy references."""

__all__ = ["INSTANCE_HEADER", "OPTIONS", "compile_kernel", "compiler_version", "instance_header"]


def compiler_version() -> str:
    """Names both compilers, e.g. "nvrtc 12.9.86, ptxas 12.9.86". Raises BuildError without the wheels."""
    return toolchain.find().version


def compile_kernel(name: str, source: str, headers: Mapping[str, str], arch: str) -> Compiled:
    """Compile one instance of a kernel.

    Args:
        name: virtual file name for messages and line info, e.g. "linear.cu".
        source: the kernel file's text.
        headers: virtual include name -> text; among them INSTANCE_HEADER, which specialises the source.
        arch: e.g. "sm_90a".

    Raises:
        BuildError: an unknown architecture, a compiler error or warning, or a source without a kernel.
    """
    toolchain.check_arch(arch)
    virtual_arch = "compute_" + arch.removeprefix("sm_")
    ptx = nvrtc.compile(source, name, headers, [f"--gpu-architecture={virtual_arch}", *OPTIONS])
    if ptx.log:
        raise BuildError(f"kernel {name}", f"compiles with warnings\n{ptx.log}", fix="warnings are errors here")
    if ".entry " not in ptx.text:
        raise BuildError(
            f"kernel {name}", "defines no kernel", "one function declared as ATLAS_KERNEL(arguments) { ... }"
        )
    cubin = ptxas.assemble(ptx.text, arch, name)
    return Compiled(cubin.image, cubin.registers, cubin.spills, cubin.stack, cubin.static_shared)
