"""Runs a compiler and says what it cost in processor time, which a busy machine does not change."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from atlas.errors import BuildError


@dataclasses.dataclass(frozen=True)
class Done:
    """status: exit code. log: what it printed. seconds: processor time, its children included."""

    status: int
    log: str
    seconds: float


_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864"}
"""A compiler's memory in huge pages: ptxas takes a tenth less time, most of it the kernel's for 6,000 page faults."""

_INJECTING = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")
"""Variables by which nvcc takes options that no cache key would know of."""


def run(command: Sequence[str], folder: Path, name: str) -> Done:
    """Run `command` inside `folder`. Raises BuildError, about `name`, if it cannot be started."""
    output = folder / "output.log"
    with output.open("wb") as file:
        try:
            # Not a pipe: wait4 is what knows this one child's processor time, and it does not drain pipes.
            child = subprocess.Popen(
                command,
                cwd=folder,
                env=_HUGE_PAGES | {name: value for name, value in os.environ.items() if name not in _INJECTING},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise BuildError(name, f"could not be run ({error})") from None
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    log = output.read_text(errors="replace").strip()
    return Done(child.returncode, log, usage.ru_utime + usage.ru_stime)
