"""CUDA C++ -> PTX by NVRTC, through ctypes.

Sources and headers go in as text under virtual names, and come out under those names in logs and line
info (if asked for). The same input gives the same bytes in any folder, on any machine with the same wheels.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence

from atlas.build import toolchain
from atlas.errors import BuildError


@dataclasses.dataclass(frozen=True)
class Ptx:
    """text: PTX assembly. log: the compiler's remarks, empty for a clean source."""

    text: str
    log: str


_MINIMAL = "--minimal"
"""Leaves out declarations (textures, the run-time API) that kernels have no use for: the same code, 5 ms sooner."""


def compile(source: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> Ptx:
    """Compile one translation unit. Safe to call from several threads.

    Args:
        name: virtual file name of the source, e.g. "rms_norm.cu".
        headers: virtual include name -> text, e.g. "atlas/reduce.cuh".
        options: NVRTC options; the header folders of the wheels are added.

    Raises:
        BuildError: naming `name`, with the compiler's log; also when the toolchain is missing.
    """
    tools = toolchain.wheels()
    library = _library(str(tools.nvrtc), str(tools.nvrtc_builtins))
    arguments = [*options, _MINIMAL, *(f"--include-path={folder}" for folder in tools.includes)]
    program = ctypes.c_void_p()
    count = len(headers)
    status = library.nvrtcCreateProgram(
        ctypes.byref(program),
        source.encode(),
        name.encode(),
        count,
        _strings(list(headers.values())),
        _strings(list(headers)),
    )
    _check(library, status, name, "nvrtcCreateProgram")
    try:
        status = library.nvrtcCompileProgram(program, len(arguments), _strings(arguments))
        log = _text(library, "nvrtcGetProgramLog", program, name).strip()
        if status != 0:
            found = library.nvrtcGetErrorString(status).decode()
            raise BuildError(f"kernel {name}", f"NVRTC: {found}\n{_virtual(log)}")
        return Ptx(_virtual(_text(library, "nvrtcGetPTX", program, name)), _virtual(log))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _library(path: str, builtins_path: str) -> ctypes.CDLL:
    _keep_memory()
    # NVRTC opens its builtins by soname alone: opening them first by path makes that succeed
    # without LD_LIBRARY_PATH.
    ctypes.CDLL(builtins_path, mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    library.nvrtcGetErrorString.argtypes = [ctypes.c_int]
    strings = ctypes.POINTER(ctypes.c_char_p)
    pointer = ctypes.POINTER(ctypes.c_void_p)
    library.nvrtcCreateProgram.argtypes = [
        pointer,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
        strings,
        strings,
    ]
    library.nvrtcCompileProgram.argtypes = [ctypes.c_void_p, ctypes.c_int, strings]
    library.nvrtcDestroyProgram.argtypes = [pointer]
    for query in ("nvrtcGetProgramLog", "nvrtcGetPTX"):
        getattr(library, query).argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        getattr(library, query + "Size").argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    return library


def _keep_memory() -> None:
    """Let glibc keep what a compile frees for the next one. Given back and asked for again, its pages cost 6 % of
    NVRTC's time (two threads, kernels of Hopper's products); the process has some 140 MB either way."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        for parameter, value in ((_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20), (_M_MMAP_THRESHOLD, 1 << 30)):
            adjust(parameter, value)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h


def _strings(values: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def _text(library: ctypes.CDLL, query: str, program: ctypes.c_void_p, name: str) -> str:
    """One of NVRTC's outputs: ask for its size, then for the bytes."""
    size = ctypes.c_size_t()
    _check(library, getattr(library, query + "Size")(program, ctypes.byref(size)), name, query)
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    _check(library, getattr(library, query)(program, buffer), name, query)
    return buffer.value.decode(errors="replace")


def _check(library: ctypes.CDLL, status: int, name: str, call: str) -> None:
    if status != 0:
        raise BuildError(f"kernel {name}", f"{call}: {library.nvrtcGetErrorString(status).decode()}")


def _virtual(text: str) -> str:
    """`text` without this machine's folders: line info and logs name headers as <cuda>/cuda_bf16.hpp."""
    for folder in toolchain.wheels().includes:
        text = text.replace(f"{folder}{os.sep}", "<cuda>/")
    here = os.getcwd()
    return text if here == os.sep else text.replace(f"{here}{os.sep}", "")
