"""CUDA architecture names: what an image of an architecture runs on, and why not elsewhere.

`sm_XY` names machine code (a cubin), `compute_XY` PTX, which the driver compiles when it loads it.
A suffix gives access to instructions of one chip (`a`) or one family (`f`), and costs portability:

| image | runs on |
| --- | --- |
| `sm_80` | the same major version, its minor version or a later one: 8.0, 8.6, 8.7, 8.9 |
| `sm_90a`, `compute_90a` | that capability alone: 9.0. `sm_120a` does not load on 12.1 |
| `sm_120f`, `compute_120f` | its family from that minor version on: 12.0 and 12.1 |
| `compute_80` | that capability and every later one |

Standard library only: the build and the runtime's choice of kernels both ask here.
"""

from __future__ import annotations

import dataclasses
import re

from atlas.errors import BuildError

_NAME = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")

FAMILIES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((10, 0), (10, 3)),
    ((11, 0),),
    ((12, 0), (12, 1)),
)
"""Capabilities that share family-specific features, by NVIDIA's tables. 10.1 is the old name of 11.0."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A parsed name: machine code or PTX, its capability, and the suffix ("", "a" or "f")."""

    name: str
    virtual: bool
    capability: tuple[int, int]
    suffix: str

    @property
    def ptx(self) -> str:
        """The virtual architecture of the same features: `compute_90a` for `sm_90a`."""
        return "compute_" + self.name.split("_")[1]


def parse(arch: str) -> Architecture:
    """Raises BuildError for text that is not an architecture name."""
    match = _NAME.fullmatch(arch)
    if not match:
        raise BuildError(
            "arch",
            f"{arch!r} is not an architecture name",
            "sm_XY or compute_XY, X.Y a compute capability, then a or f",
        )
    kind, major, minor, suffix = match.groups()
    return Architecture(arch, kind == "compute", (int(major), int(minor)), suffix)


def runs_on(arch: str, capability: tuple[int, int]) -> str | None:
    """None if an image of `arch` runs on a device of `capability`; otherwise what it would run on."""
    image = parse(arch)
    if _fits(image, capability):
        return None
    what = "PTX" if image.virtual else "code"
    return f"{arch} {what} runs on {where(arch)}, and this device is {_text(capability)}"


def where(arch: str) -> str:
    """The capabilities that an image of `arch` runs on, in words."""
    image = parse(arch)
    own = _text(image.capability)
    if image.suffix == "a":
        return f"compute capability {own} only (suffix a)"
    if image.suffix == "f":
        members = [_text(c) for c in _family(image.capability) if c >= image.capability]
        return f"compute capability {' and '.join(members)} only (suffix f: its family)"
    if image.virtual:
        return f"compute capability {own} and later"
    return f"compute capability {image.capability[0]}.x from {own} on"


def _fits(image: Architecture, capability: tuple[int, int]) -> bool:
    if image.suffix == "a":
        return capability == image.capability
    if image.suffix == "f":
        return capability in _family(image.capability) and capability >= image.capability
    if image.virtual:
        return capability >= image.capability
    return capability[0] == image.capability[0] and capability >= image.capability


def _family(capability: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return next((family for family in FAMILIES if capability in family), (capability,))


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
