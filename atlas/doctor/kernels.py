"""Checks of kernel sets: which are here, which this machine can run, and which MODEL would get."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from atlas.build.architecture import runs_on
from atlas.doctor.machine import available_memory
from atlas.doctor.report import Context, Result, gigabytes
from atlas.errors import AtlasError

REINSTALL = (
    "install again for this machine: ATLAS_TARGET_HW=native pip install --no-cache-dir --force-reinstall --no-deps ."
)


def kernel_sets(context: Context) -> list[Result]:
    """Every kernel set, embedded or in a pack, and whether it can run here."""
    if context.extension[0] is None:
        return [Result("kernel sets", "skipped", "needs the extension")]
    try:
        manifest = context.manifest
    except AtlasError as error:
        return [Result("kernel sets", "problem", str(error), REINSTALL)]
    assert manifest is not None
    if not manifest.sets:
        return [Result("kernel sets", "problem", "this install holds none", REINSTALL)]
    return [Result("kernel sets", "ok", f"{source}: {name}: {verdict}") for source, name, verdict in _verdicts(context)]


def _verdicts(context: Context) -> list[tuple[str, str, str]]:
    """(source, name, verdict) of each set."""
    assert context.manifest is not None
    devices, reason = context.devices
    verdicts = []
    for entry in context.manifest.sets:
        verdict = "runs on this CPU"
        if entry.kind == "cuda":
            why_not = [runs_on(entry.arch, tuple(device["compute_capability"])) for device in devices]
            matching = [d["name"] for d, why in zip(devices, why_not, strict=True) if why is None]
            unfit = next(filter(None, why_not), f"no GPU: {reason.partition('; ')[0]}")
            verdict = f"runs on {matching[0]}" if matching else f"does not run here: {unfit}"
        verdicts.append(("embedded", entry.name, verdict))
    return verdicts


def model(context: Context) -> list[Result]:
    """The kernel set that MODEL would get, and whether its weights fit. Nothing is downloaded."""
    if context.model is None:
        return [Result("model", "skipped", "name a MODEL to see which kernels it would get")]
    if context.extension[0] is None and context.backend != "reference":
        return [Result("model", "skipped", "needs the extension")]
    try:
        config, origin = _configuration(context.model)
        return _choice(context, config, origin)
    except AtlasError as error:
        remedy = error.fix or (f"accepted: {error.accepted}" if error.accepted else "see the other checks")
        return [Result("model", "problem", f"{context.model}: {error.where}: {error.found}", remedy)]


def _configuration(name: str) -> tuple[Mapping[str, Any], str]:
    """A model's configuration and where it is from: its files on this machine, or the public facts of its name.

    Raises:
        AtlasError: neither is there.
    """
    from atlas.targets.tree import kernels_root
    from atlas.weights import open_checkpoint
    from atlas.weights.fetch import resolve_model

    try:
        path = resolve_model(name, offline=True)
    except AtlasError as error:
        facts = kernels_root() / "models" / f"{name.lower()}.json"
        if "/" in name or not facts.is_file():
            raise AtlasError(
                error.where,
                error.found,
                error.accepted,
                error.fix or "give the path of its files, or fetch it first (doctor downloads nothing)",
            ) from None
        return json.loads(facts.read_text()), "its public facts, for its files are not on this machine"
    with open_checkpoint(path) as checkpoint:
        return checkpoint.config, str(path)


def _choice(context: Context, config: Mapping[str, Any], origin: str) -> list[Result]:
    from atlas.models import family_of
    from atlas.runtime import kernel_set
    from atlas.targets.quant import DTYPE_BYTES, recipe
    from atlas.targets.shape import Shard

    family = family_of(config)
    configured = family.configure(config, Shard())
    devices, reason = context.devices
    choice = kernel_set.choose(
        context.backend, context.quant, configured.shape, context.manifest, devices, reason.partition("; ")[0]
    )
    found = f"{context.model} ({origin}) would run on {choice.name}: {choice.reason}"
    programs = family.record(configured, recipe(choice.quant))
    weights = sum(
        DTYPE_BYTES[buffer.dtype] * math.prod(buffer.extents({}))
        for buffer in programs.buffers.values()
        if buffer.kind == "weight"
    )
    room = available_memory(context)
    if choice.backend == "cuda":
        room = next(d["total_memory"] for d in devices if d["index"] == choice.device)
    if room is not None and weights > room:
        remedy = "take a quant with fewer bytes (--quant), a smaller model, or a machine with more memory"
        return [Result("model", "problem", f"{found}; weights take {gigabytes(weights)} of {gigabytes(room)}", remedy)]
    return [Result("model", "ok", f"{found}; weights take {gigabytes(weights)}")]
