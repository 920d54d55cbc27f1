"""PTX -> device image by ptxas, with the resources that each kernel uses."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path

from atlas.build import process, toolchain
from atlas.errors import BuildError


@dataclasses.dataclass(frozen=True)
class Resources:
    """What `ptxas -v` reports, over all functions of an image.

    registers: per thread. spill_stores, spill_loads, stack: bytes per thread in local memory.
    static_shared: bytes per block.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int


@dataclasses.dataclass(frozen=True)
class Cubin:
    """A device image for one architecture, its resources, the assembler's log and its processor time."""

    image: bytes
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int
    log: str
    seconds: float = dataclasses.field(default=0.0, compare=False)

    @property
    def spills(self) -> int:
        """Bytes of spill stores and loads: what a kernel's `[limits] spills` bounds."""
        return self.spill_stores + self.spill_loads


def assemble(ptx: str, arch: str, name: str = "kernel") -> Cubin:
    """Assemble PTX for `arch` (e.g. "sm_90a"). `name` is for error messages only.

    Raises:
        BuildError: ptxas refuses the text; the log is in the message.
    """
    toolchain.check_arch(arch)
    tools = toolchain.wheels()
    with tempfile.TemporaryDirectory(prefix="atlas-ptxas-") as folder:
        # Run inside the folder under fixed names, so that no path of this machine can reach the image.
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [str(tools.ptxas), f"--gpu-name={arch}", "--verbose", "--warning-as-error"]
        command += ["--output-file=kernel.cubin", "kernel.ptx"]
        done = process.run(command, Path(folder), "ptxas")
        if done.status != 0:
            raise BuildError(f"kernel {name}", f"ptxas for {arch} failed\n{done.log}")
        image = Path(folder, "kernel.cubin").read_bytes()
    return Cubin(image, **dataclasses.asdict(parse_resources(done.log)), log=done.log, seconds=done.seconds)


def parse_resources(log: str) -> Resources:
    """The resources in the text that `ptxas -v` prints. Raises BuildError if they are not there."""
    registers = _numbers(r"Used (\d+) registers", log)
    if not registers:
        raise BuildError("ptxas", f"its output names no registers\n{log}")
    return Resources(
        registers=max(registers),
        spill_stores=sum(_numbers(r"(\d+) bytes spill stores", log)),
        spill_loads=sum(_numbers(r"(\d+) bytes spill loads", log)),
        stack=max(_numbers(r"(\d+) bytes stack frame", log), default=0),
        static_shared=max(_numbers(r"(\d+) bytes smem", log), default=0),
    )


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, text)]
