"""CUDA C++ -> PTX -> device image by an nvcc: the alternative to the wheels (ATLAS_CUDA_COMPILER).

The same two steps as with NVRTC and ptxas, so that what is checked in the PTX is what is assembled.
nvcc knows files only: the virtual names are laid out in a temporary folder and compiled from within,
under relative names, and nothing of the folder reaches the output.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from atlas.build import process, ptxas
from atlas.build.toolchain import VARIABLE, Nvcc
from atlas.errors import BuildError


@dataclasses.dataclass(frozen=True)
class Output:
    """PTX, the image assembled from it, and the processor time of both steps."""

    ptx: str
    image: bytes
    resources: ptxas.Resources
    seconds: float


def compile(
    tools: Nvcc,
    source: str,
    name: str,
    headers: Mapping[str, str],
    options: Sequence[str],
    arch: str,
    virtual_arch: str,
) -> Output:
    """Compile one translation unit; warnings are errors.

    Args:
        name: virtual file name of the source, e.g. "rms_norm.cu".
        headers: virtual include name -> text.

    Raises:
        BuildError: naming `name` and the variable that chose this compiler, with its log.
    """
    with tempfile.TemporaryDirectory(prefix="atlas-nvcc-") as temporary:
        folder = Path(temporary)
        for file, text in ((name, source), *headers.items()):
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        common = [str(tools.path), "--Werror=all-warnings"]
        seconds = 0.0
        log = ""
        to_ptx = ["--ptx", f"--gpu-architecture={virtual_arch}", "-I.", *options, f"--output-file={name}.ptx", name]
        to_cubin = ["--cubin", f"--gpu-architecture={arch}", "--ptxas-options=--verbose,--warning-as-error"]
        to_cubin += [f"--output-file={name}.cubin", f"{name}.ptx"]
        for step in (to_ptx, to_cubin):
            done = process.run([*common, *step], folder, VARIABLE)
            seconds += done.seconds
            log = done.log
            if done.status != 0:
                raise BuildError(f"kernel {name}", f"{tools.version} ({VARIABLE}) for {arch} failed\n{done.log}")
        ptx = (folder / f"{name}.ptx").read_text()
        return Output(ptx, (folder / f"{name}.cubin").read_bytes(), ptxas.parse_resources(log), seconds)
