"""Chooses backend and kernel set for a model on this machine, and says why.

No silent slow path: the choice carries its reason, and what was asked for explicitly is never
replaced by something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from atlas.build.manifest import KernelSet, Manifest
from atlas.errors import ConfigError, DeviceError
from atlas.targets.shape import Shape

DEFAULT_QUANT = "bf16"
"""Quant when none is asked for: every backend has it, at half the bytes of f32."""

BACKENDS = ("auto", "cpu", "cuda", "reference")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which backend and kernel set will run, and why. `kernel_set` is None for `reference`."""

    backend: str
    quant: str
    kernel_set: KernelSet | None
    device: int
    reason: str

    @property
    def name(self) -> str:
        return self.kernel_set.name if self.kernel_set else f"reference/{self.quant}"


def choose(
    backend: str,
    quant: str | None,
    shape: Shape,
    manifest: Manifest | None,
    devices: Sequence[dict[str, Any]],
    no_device: str = "",
) -> Choice:
    """Choose among the sets of `manifest` (None: no extension) for `devices` (as the core lists them).

    no_device: why `devices` is empty.

    Raises:
        ConfigError: an unknown backend.
        DeviceError: what was asked for cannot run here; the message lists what could.
    """
    if backend not in BACKENDS:
        raise ConfigError("backend", f"unknown backend {backend!r}", ", ".join(BACKENDS))
    wanted = quant or DEFAULT_QUANT
    if backend == "reference":
        return Choice("reference", wanted, None, -1, "asked for")
    sets = manifest.sets if manifest else ()
    cuda_reason = f"no GPU: {no_device}" if not devices else ""
    if backend in ("auto", "cuda"):
        for device in devices:
            capability = tuple(device["compute_capability"])
            for candidate in sets:
                if candidate.kind != "cuda" or candidate.compute_capability != capability:
                    continue
                if candidate.shape_hash == shape.hash() and candidate.quant == wanted:
                    reason = f"{device['name']} matches {candidate.name}, shape {candidate.shape_hash}"
                    return Choice("cuda", wanted, candidate, device["index"], reason)
            cuda_reason = (
                f"no kernel set for {device['name']} (compute capability {capability[0]}.{capability[1]}), "
                f"shape {shape.hash()}, quant {wanted}"
            )
        if backend == "cuda":
            have = ", ".join(f"{s.name} (shape {s.shape_hash})" for s in sets if s.kind == "cuda") or "none"
            raise DeviceError(
                "backend cuda",
                cuda_reason,
                f"this install's CUDA kernel sets: {have}",
                "reinstall with ATLAS_TARGET_HW, ATLAS_TARGET_MODEL and ATLAS_TARGET_QUANT set, or use --backend cpu",
            )
    for candidate in sets:
        if candidate.kind == "cpu" and candidate.quant == wanted:
            reason = "asked for" if backend == "cpu" else cuda_reason
            return Choice("cpu", wanted, candidate, -1, reason)
    have = ", ".join(s.name for s in sets) or "none: the extension is not built"
    raise DeviceError(f"backend {backend}", f"no kernel set for quant {wanted}", have)
