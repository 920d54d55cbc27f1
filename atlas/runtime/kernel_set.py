"""Chooses backend and kernel set for a model on this machine, and says why.

No silent slow path: the choice carries its reason, and what was asked for explicitly is never
replaced by something else.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from atlas.build.architecture import parse, runs_on
from atlas.build.manifest import KernelEntry, KernelSet, KernelVariant
from atlas.errors import AtlasError, ConfigError, DeviceError
from atlas.ops import OPS
from atlas.runtime.kernel_sources import EMBEDDED, Source
from atlas.targets.shape import Shape

_log = logging.getLogger(__name__)

DEFAULT_QUANT = "bf16"
"""Quant when none is asked for and the checkpoint has none of its own, or no kernels here: half the bytes of f32."""

NO_PREFERENCE = {"cpu": DEFAULT_QUANT, "cuda": DEFAULT_QUANT}

BACKENDS = ("auto", "cpu", "cuda", "reference")

USABLE = "usable"

NO_GPU_FIX = "run it where the NVIDIA driver shows a GPU"
"""Other kernels would not help."""

Device = dict[str, Any]
"""A GPU as the core lists it."""

Lacks = Callable[[KernelSet], str]
"""What a set of the right shape and quant does not have of the kernels that the checkpoint needs; "" if nothing."""


def lacks_nothing(kernel_set: KernelSet) -> str:
    """Where no checkpoint says what it needs."""
    return ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which backend and kernel set will run, and why. `kernel_set` is None for `reference`.

    source: where the set comes from.  images: the source's device images.
    ptx: the set's PTX is loaded, compiled by the driver, because its machine code does not run here.
    """

    backend: str
    quant: str
    kernel_set: KernelSet | None
    device: int
    reason: str
    source: str = ""
    images: Sequence[memoryview] = dataclasses.field(default=(), compare=False, repr=False)
    ptx: bool = False

    @property
    def name(self) -> str:
        return self.kernel_set.name if self.kernel_set else f"reference/{self.quant}"

    @property
    def target(self) -> tuple[str, str, str]:
        """Hardware, model and quant; a model of "*" stands for any."""
        found = self.kernel_set
        return (found.hardware, found.model, found.quant) if found else ("reference", "*", self.quant)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel set that was looked at. verdict: USABLE, or why it is not; set_name is "" for a source that
    could not be opened."""

    source: str
    set_name: str
    verdict: str

    def __str__(self) -> str:
        return f"{self.source}{' ' if self.set_name else ''}{self.set_name}: {self.verdict}"


def choose(
    backend: str,
    quant: str | None,
    shape: Shape,
    sources: Iterable[Source],
    devices: Sequence[Device],
    no_device: str = "",
    fix: str = "",
    natural: Mapping[str, str] = NO_PREFERENCE,
    lacks: Lacks = lacks_nothing,
) -> Choice:
    """The first kernel set, in the order of `sources` (atlas/runtime/kernel_sources.py), that runs on one of `devices`.

    no_device: why `devices` is empty.  fix: what to do when no kernel set fits.
    natural: kind of hardware -> the quant nearest to how the checkpoint is stored, taken when none is asked for. Where
        there are no kernels for it, DEFAULT_QUANT's are taken, and the reason says so.

    Raises:
        ConfigError: an unknown backend.
        DeviceError: what was asked for cannot run here; the message lists what could.
        AtlasError: a pack that was asked for, or the extension, cannot be used.
    """
    if backend not in BACKENDS:
        raise ConfigError("backend", f"unknown backend {backend!r}", ", ".join(BACKENDS))
    wanted = (quant,) if quant else tuple(dict.fromkeys((natural["cuda"], DEFAULT_QUANT)))
    if backend == "reference":
        return Choice("reference", quant or natural["cpu"], None, -1, "asked for")
    have: list[KernelSet] = []
    near: list[Candidate] = []  # would have been this model's, but are refused
    asked: list[Candidate] = []
    opened: list[Source] = []
    for source in sources:
        if asked and not source.asked_for:
            break
        if source.error is not None:
            if source.asked_for or source.label == EMBEDDED:
                raise source.error
            # Without its fix, which is this function's own and said once.
            problem = AtlasError(source.error.where, source.error.found, source.error.accepted)
            near.append(Candidate(source.label, "", str(problem)))
            continue
        assert source.manifest is not None
        have += source.manifest.sets
        for device in devices if backend != "cpu" else ():
            choice = _on_device(source, device, shape.hash(), wanted[0], near, lacks)
            if choice and quant is None and wanted[0] != DEFAULT_QUANT:
                return _because(choice, f"quant {wanted[0]} because the checkpoint stores it (--quant takes another)")
            if choice:
                return choice
        if source.asked_for:
            sets = source.manifest.sets
            asked += [_judge(source, s, shape.hash(), wanted, devices, no_device, quant is None, lacks) for s in sets]
        opened.append(source)
    for source, device, other in itertools.product(opened, devices if backend != "cpu" else (), wanted[1:]):
        choice = _on_device(source, device, shape.hash(), other, near, lacks)
        if choice:
            why = f"quant {other}, to which the checkpoint's {wanted[0]} is widened: no kernels for {wanted[0]} here"
            _log.warning("%s%s", why, f"; {fix}" if fix else "")
            return _because(choice, why)
    if asked:
        advice = fix if devices else NO_GPU_FIX
        accepted = f"{_what(devices, '') if devices else 'a GPU that the pack is for'}, {_need(shape, wanted)}"
        raise DeviceError("kernel_pack", "; ".join(map(str, asked)), accepted, advice)
    for candidate in near:
        _log.warning("not used: %s", candidate)
    reason = f"no GPU: {no_device}"
    if devices:
        reason = f"no kernel set for {_what(devices, '')}, {_need(shape, wanted)}"
        reason += "".join(f"; refused: {candidate}" for candidate in near)
    if backend == "cuda":
        names = ", ".join(f"{s.name} (shape {s.shape_hash})" for s in have if s.kind == "cuda") or "none"
        if devices:
            advice = "reinstall with ATLAS_TARGET_HW, ATLAS_TARGET_MODEL and ATLAS_TARGET_QUANT set"
            advice = f"{fix}; or {advice}" if fix else advice
        else:
            advice = NO_GPU_FIX
        advice += ", or use --backend cpu"
        raise DeviceError("backend cuda", reason, f"the CUDA kernel sets here: {names}", advice)
    if devices and fix:
        reason += f"; {fix}"
    for name in (quant,) if quant else (natural["cpu"], DEFAULT_QUANT):
        for kernel_set in have:
            if kernel_set.kind == "cpu" and kernel_set.quant == name:
                return Choice("cpu", name, kernel_set, -1, "asked for" if backend == "cpu" else reason, EMBEDDED)
    names = ", ".join(s.name for s in have if s.kind == "cpu") or "none: the extension is not built"
    found = f"no kernel set for quant {name}"
    if backend == "auto":
        found += f" on the CPU, and {reason}"
    raise DeviceError(f"backend {backend}", found, names)


def candidates(
    quant: str | None, shape: Shape | None, sources: Iterable[Source], devices: Sequence[Device], no_device: str = ""
) -> list[Candidate]:
    """Every kernel set of `sources` and whether it would run. shape: the model's; None asks about the device alone.

    Never raises for a source that cannot be opened: that is its verdict.
    """
    found = []
    for source in sources:
        if source.manifest is None:
            found.append(Candidate(source.label, "", str(source.error)))
            continue
        shape_hash = shape.hash() if shape else None
        quants = (quant,) if quant else ()
        found += [_judge(source, s, shape_hash, quants, devices, no_device) for s in source.manifest.sets]
    return found


def device_images(choice: Choice) -> tuple[dict[str, KernelEntry], list[memoryview]]:
    """The kernels of a CUDA choice by name, and the images they refer to by index: those and no others."""
    assert choice.kernel_set is not None

    def place(variant: KernelVariant) -> int:
        return variant.ptx if choice.ptx else variant.image

    used = sorted({place(variant) for kernel in choice.kernel_set.kernels for variant in kernel.variants})
    kernels = {}
    for kernel in choice.kernel_set.kernels:
        variants = (dataclasses.replace(variant, image=used.index(place(variant))) for variant in kernel.variants)
        kernels[kernel.name] = dataclasses.replace(kernel, variants=tuple(variants))
    # The driver gets an address without a length; PTX is text, which ends at a zero byte.
    return kernels, [memoryview(bytes(choice.images[i]) + b"\0") if choice.ptx else choice.images[i] for i in used]


def _on_device(
    source: Source, device: Device, shape_hash: str, quant: str, near: list[Candidate], lacks: Lacks
) -> Choice | None:
    """The source's set for a device: one made for its very capability before one that merely runs on it."""
    assert source.manifest is not None
    capability = tuple(device["compute_capability"])
    sets = [s for s in source.manifest.sets if s.kind == "cuda" and (s.shape_hash, s.quant) == (shape_hash, quant)]
    for kernel_set in sorted(sets, key=lambda s: s.compute_capability != capability):
        refusal, ptx = _refusal(kernel_set, capability)
        if refusal := refusal or lacks(kernel_set):
            near.append(Candidate(source.label, kernel_set.name, refusal))
            continue
        reason = f"{device['name']} matches {kernel_set.name}, shape {shape_hash}, {source.label}"
        if ptx:
            reason += (
                f"; its PTX, which the driver compiles ({runs_on(kernel_set.arch, capability) or 'no machine code'})"
            )
        others = [c for c in near if (c.source, c.set_name) != (source.label, kernel_set.name)]
        reason += "".join(f"; refused: {candidate}" for candidate in others)
        return Choice("cuda", quant, kernel_set, device["index"], reason, source.label, source.images, ptx)
    return None


def _judge(
    source: Source,
    kernel_set: KernelSet,
    shape_hash: str | None,
    quants: Sequence[str],
    devices: Sequence[Device],
    no_device: str,
    unset: bool = False,
    lacks: Lacks = lacks_nothing,
) -> Candidate:
    """The verdict on one set: the first mismatch found.

    quants: those that would do; without any, all do.  unset: the user named none.
    """
    verdict = USABLE
    if quants and kernel_set.quant not in quants:
        verdict = f"is for quant {kernel_set.quant}, not {' or '.join(quants)}"
        if unset and kernel_set.kind == "cuda":
            verdict += f", which a GPU takes unless --quant {kernel_set.quant} is given"
    elif kernel_set.kind == "cuda":
        if shape_hash is not None and kernel_set.shape_hash != shape_hash:
            verdict = f"is compiled for shape {kernel_set.shape_hash}, not {shape_hash}"
        elif not devices:
            verdict = f"no GPU: {no_device}" if no_device else "no GPU"
        else:
            refusals = [_refusal(kernel_set, tuple(device["compute_capability"]))[0] for device in devices]
            verdict = (lacks(kernel_set) or USABLE) if "" in refusals else refusals[0]
    else:
        verdict = _contracts(kernel_set) or USABLE
    return Candidate(source.label, kernel_set.name, verdict)


def _refusal(kernel_set: KernelSet, capability: tuple[int, ...]) -> tuple[str, bool]:
    """Why a set does not run on a device, or "", and whether its PTX does where its machine code does not."""
    if problem := _contracts(kernel_set):
        return problem, False
    major, minor = capability
    variants = [variant for kernel in kernel_set.kernels for variant in kernel.variants]
    has_ptx = all(variant.ptx >= 0 for variant in variants)
    try:
        code = runs_on(kernel_set.arch, (major, minor))
        if code is None and all(variant.image >= 0 for variant in variants):
            return "", False
        ptx = runs_on(parse(kernel_set.arch).ptx, (major, minor))
    except AtlasError as error:
        return str(error), False
    if has_ptx and ptx is None:
        return "", True
    return code or ptx or "not every kernel has machine code or PTX", False


def _contracts(kernel_set: KernelSet) -> str:
    """The first kernel that was written to another op contract than this version's."""
    for kernel in kernel_set.kernels:
        if kernel.op not in OPS:
            return f"kernel {kernel.name} is of an op {kernel.op!r} that this version does not have"
        if kernel.contract != (accepted := OPS[kernel.op].contract_hash()):
            return f"op {kernel.op} has contract {kernel.contract}, accepted: {accepted}"
    return ""


def _what(devices: Sequence[Device], no_device: str) -> str:
    if not devices:
        return f"no GPU: {no_device}"
    return " and ".join(
        f"{d['name']} (compute capability {'.'.join(map(str, d['compute_capability']))})" for d in devices
    )


def _need(shape: Shape, quants: Sequence[str]) -> str:
    return f"shape {shape.hash()}, quant {' or '.join(quants)}"


def _because(choice: Choice, why: str) -> Choice:
    return dataclasses.replace(choice, reason=f"{choice.reason}; {why}")
