"""What a check found, and what checks share."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atlas.errors import AtlasError

if TYPE_CHECKING:
    from atlas.build.manifest import Manifest

Status = Literal["ok", "note", "problem", "skipped"]


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the report.

    status: "problem" makes the exit code 1; "note" is worth knowing and nothing is broken; "skipped" could
        not be checked because of a problem told elsewhere.
    remedy: what to do; a problem always has one.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.status != "problem", f"{self.check}: a problem without a remedy: {self.found}"


class Context:
    """What several checks look at, found once.

    model: the MODEL whose kernel set is asked for.  quant, backend, kernel_packs: as for `serve`.
    """

    def __init__(
        self,
        model: str | None = None,
        quant: str | None = None,
        backend: str = "auto",
        kernel_packs: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        cgroup: Path = Path("/sys/fs/cgroup"),
        meminfo: Path = Path("/proc/meminfo"),
    ) -> None:
        self.model, self.quant, self.backend, self.kernel_packs = model, quant, backend, kernel_packs
        self.environment = os.environ if environment is None else environment
        self.cgroup, self.meminfo = cgroup, meminfo

    @functools.cached_property
    def extension(self) -> tuple[Any, str]:
        """The compiled module, or None and why it does not load."""
        try:
            from atlas.runtime import core

            return core.extension(), ""
        except (AtlasError, ImportError) as error:
            return None, str(error)

    @functools.cached_property
    def devices(self) -> tuple[list[dict[str, Any]], str]:
        """The GPUs as the core lists them, and why there are none."""
        core, reason = self.extension
        if core is None:
            return [], reason
        try:
            found = list(core.cuda_devices())
        except AtlasError as error:
            return [], error.found
        return found, "" if found else "the NVIDIA driver reports no device"

    @functools.cached_property
    def manifest(self) -> Manifest | None:
        """The embedded kernel sets; None where the extension does not load. Raises AtlasError if they are damaged."""
        if self.extension[0] is None:
            return None
        from atlas.runtime import core

        return core.embedded()[0]


def gigabytes(nbytes: float) -> str:
    """A size as people compare it: `1.53 GB`."""
    return f"{nbytes / 1e9:.2f} GB"
