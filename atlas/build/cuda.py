"""One CUDA kernel instance: source and instance header -> PTX -> device image, looked at."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from atlas.build import architecture, inspect, nvcc, nvrtc, ptxas, toolchain
from atlas.build.instance import HEADER_NAME as INSTANCE_HEADER
from atlas.build.instance import instance_header
from atlas.build.kernel_cache import Compiled
from atlas.errors import BuildError

OPTIONS: tuple[str, ...] = ("--std=c++17", "--define-macro=NDEBUG")
"""Options of either compiler beside the architecture; part of cache keys. No fast-math: division, square
root and denormals are IEEE, because ops are compared with their NumPy references."""

__all__ = ["INSTANCE_HEADER", "OPTIONS", "compile_kernel", "compiler_version", "instance_header"]


def compiler_version() -> str:
    """Names the compilers, e.g. "nvrtc 12.9.86, ptxas 12.9.86". Raises BuildError where there is none."""
    return toolchain.find().version


def compile_kernel(name: str, source: str, headers: Mapping[str, str], arch: str) -> Compiled:
    """Compile one instance of a kernel.

    Args:
        name: virtual file name for messages, e.g. "linear.cu".
        source: the kernel file's text.
        headers: virtual include name -> text; among them INSTANCE_HEADER, which specialises the source.
        arch: e.g. "sm_90a".

    Raises:
        BuildError: an unknown architecture, a compiler error or warning, or a source without a kernel.
    """
    toolchain.check_arch(arch)
    virtual_arch = architecture.parse(arch).ptx
    tools = toolchain.find()
    if isinstance(tools, toolchain.Nvcc):
        output = nvcc.compile(tools, source, name, headers, OPTIONS, arch, virtual_arch)
        text, image, resources, seconds = output.ptx, output.image, output.resources, output.seconds
        symbol = _entry(text, name)
    else:
        # NVRTC compiles on the calling thread, so the thread's clock has it all.
        started = time.thread_time()
        ptx = nvrtc.compile(source, name, headers, [f"--gpu-architecture={virtual_arch}", *OPTIONS])
        if ptx.log:
            raise BuildError(f"kernel {name}", f"compiles with warnings\n{ptx.log}", fix="warnings are errors here")
        text, seconds = ptx.text, time.thread_time() - started
        symbol = _entry(text, name)
        cubin = ptxas.assemble(text, arch, name)
        image, seconds = cubin.image, seconds + cubin.seconds
        resources = ptxas.Resources(
            cubin.registers, cubin.spill_stores, cubin.spill_loads, cubin.stack, cubin.static_shared
        )
    found = inspect.access(text, symbol)
    return Compiled(
        image=image,
        ptx=text.encode(),
        registers=resources.registers,
        spills=resources.spill_stores + resources.spill_loads,
        stack=resources.stack,
        static_shared=resources.static_shared,
        reads=found.reads,
        writes=found.writes,
        seconds=round(seconds, 3),
    )


def _entry(ptx: str, name: str) -> str:
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if len(entries) != 1:
        found = f"defines {', '.join(entries)}" if entries else "defines no kernel"
        raise BuildError(f"kernel {name}", found, "one function declared as ATLAS_KERNEL(arguments) { ... }")
    return str(entries[0])
