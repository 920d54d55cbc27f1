"""Checks of kernel sets: which are here, which this machine can run, and which MODEL would get."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from atlas.build.architecture import runs_on
from atlas.doctor.machine import available_memory
from atlas.doctor.report import Context, Result, gigabytes
from atlas.errors import AtlasError
from atlas.models import family_of
from atlas.runtime import kernel_set, kernel_sources, weight_formats
from atlas.runtime.recording import Recording
from atlas.targets.hardware import Hardware, walk
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from atlas.targets.tree import kernels_root
from atlas.weights import Checkpoint, open_checkpoint
from atlas.weights.fetch import resolve_model

REINSTALL = "install again: pip install --no-cache-dir --force-reinstall --no-deps ."


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
    devices, reason = context.devices
    sources = kernel_sources.find(kernel_packs=context.kernel_packs)
    found = kernel_set.candidates(None, None, sources, devices, reason.partition("; ")[0])
    results = [_told(candidate) for candidate in found]
    kinds = {s.name: s.kind for s in manifest.sets}
    on_gpu = [c for c in found if c.set_name and kinds.get(c.set_name, "cuda") == "cuda"]
    if devices and not any(c.verdict == kernel_set.USABLE for c in on_gpu):
        results.append(_unserved(devices, bool(on_gpu)))
    return results


def _told(candidate: kernel_set.Candidate) -> Result:
    if candidate.set_name:
        return Result("kernel sets", "ok", str(candidate))
    # The verdict holds the rebuild command where there is one.
    return Result("kernel sets", "problem", str(candidate), "remove it, or make it again with `python -m atlas.build`")


def _unserved(devices: Sequence[Mapping[str, Any]], has_others: bool) -> Result:
    """A GPU that no kernel set fits: a problem where somebody built for GPUs, and worth knowing where not."""
    device = devices[0]
    capability = tuple(device["compute_capability"])
    fitting = [h for h in _hardware() if h.arch and runs_on(h.arch, capability) is None]
    # One made for this very capability before one whose images merely run on it.
    name = next((h.name for h in sorted(fitting, key=lambda h: h.compute_capability != capability)), "")
    found = f"no kernels for {device['name']} (compute capability {capability[0]}.{capability[1]})"
    if not name:
        return Result("kernel sets", "note", f"{found}: no hardware directory fits it, so the CPU serves")
    remedy = (
        f"ATLAS_TARGET_HW={name} ATLAS_TARGET_MODEL=NAME ATLAS_TARGET_QUANT=bf16 pip install --no-cache-dir "
        "--force-reinstall --no-deps . (NAME: one of `python build_targets.py --list`), or "
        f"python -m atlas.build MODEL --hw {name} --quant bf16"
    )
    return Result("kernel sets", "problem" if has_others else "note", found, remedy)


def _hardware() -> list[Hardware]:
    try:
        return [hardware for hardware in walk(kernels_root()).values() if hardware.kind == "cuda"]
    except AtlasError:
        return []


def model(context: Context) -> list[Result]:
    """The kernel set that MODEL would get, and whether its weights fit. Nothing is downloaded."""
    if context.model is None:
        return [Result("model", "skipped", "name a MODEL to see which kernels it would get")]
    if context.extension[0] is None and context.backend != "reference":
        return [Result("model", "skipped", "needs the extension")]
    try:
        try:
            path = resolve_model(context.model, offline=True)
        except AtlasError as error:
            return _choice(context, _facts(context.model, error), _FACTS, None)
        with open_checkpoint(path) as checkpoint:
            return _choice(context, checkpoint.config, str(path), checkpoint)
    except AtlasError as error:
        remedy = error.fix or (f"accepted: {error.accepted}" if error.accepted else "see the other checks")
        return [Result("model", "problem", f"{context.model}: {error.where}: {error.found}", remedy)]


_FACTS = "its public facts, for its files are not on this machine"


def _facts(name: str, error: AtlasError) -> Mapping[str, Any]:
    """The public facts of a model whose files are not here. Raises `error`, with a remedy, where there are none."""
    facts = kernels_root() / "models" / f"{name.lower()}.json"
    if "/" in name or not facts.is_file():
        raise AtlasError(
            error.where,
            error.found,
            error.accepted,
            error.fix or "give the path of its files, or fetch it first (doctor downloads nothing)",
        ) from None
    document: dict[str, Any] = json.loads(facts.read_text())
    return document


def _choice(context: Context, config: Mapping[str, Any], origin: str, checkpoint: Checkpoint | None) -> list[Result]:
    family = family_of(config)
    configured = family.configure(config, Shard())
    natural = weight_formats.natural_quants(checkpoint) if checkpoint else kernel_set.NO_PREFERENCE
    devices, reason = context.devices
    shape = configured.shape
    fix = kernel_sources.rebuild_fix(str(context.model), context.quant or natural["cuda"], devices)
    sources = kernel_sources.find(shape.hash(), context.quant, context.kernel_packs, fix)
    no_device = reason.partition("; ")[0]
    recording = Recording(checkpoint, family, configured) if checkpoint else None
    lacks = recording.lacks if recording else kernel_set.lacks_nothing
    choice = kernel_set.choose(context.backend, context.quant, shape, sources, devices, no_device, fix, natural, lacks)
    found = f"{context.model} ({origin}) would run on {choice.name}: {choice.reason}"
    if choice.backend != "cuda" and context.quant is None and choice.quant == natural["cpu"]:
        found += f"; {choice.quant} is nearest to how the checkpoint is stored"
    kind = "cuda" if choice.backend == "cuda" else "cpu"
    roles = recipe(choice.quant, kind)
    names = [kernel.name for kernel in choice.kernel_set.kernels] if choice.kernel_set else None
    programs = recording.programs(roles, kind, names) if recording else family.record(configured, roles)
    weights = programs.weight_bytes()
    room = available_memory(context)
    if choice.backend == "cuda":
        room = next(d["total_memory"] for d in devices if d["index"] == choice.device)
    if room is not None and weights > room:
        remedy = "take a quant with fewer bytes (--quant), a smaller model, or a machine with more memory"
        return [Result("model", "problem", f"{found}; weights take {gigabytes(weights)} of {gigabytes(room)}", remedy)]
    return [Result("model", "ok", f"{found}; weights take {gigabytes(weights)}")]
