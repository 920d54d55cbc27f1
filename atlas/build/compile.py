"""Compiles selected targets: programs are recorded, their closure resolved to files, each kernel
specialised and compiled once, and the result described by a manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atlas.build import architecture, kernel_file
from atlas.build.manifest import Image, KernelEntry, KernelSet, Manifest
from atlas.cache import write_atomic
from atlas.errors import BuildError
from atlas.models import family_of, fusion
from atlas.ops import OPS
from atlas.runtime import memory_plan
from atlas.runtime.program import KernelKey
from atlas.targets import status
from atlas.targets import target as targets
from atlas.targets.quant import recipe
from atlas.targets.resolution import MissingKernel
from atlas.targets.shape import Shard
from atlas.targets.target import ANY_MODEL, Target

EMBED_VARIABLE = "ATLAS_EMBED"
EMBED_CHOICES = {
    "cubin": "machine code for the hardware's architecture",
    "ptx": "PTX that the driver compiles at load",
    "both": "machine code, and PTX for devices that it does not run on",
}


def closure(target: Target) -> Mapping[KernelKey, tuple[str, ...]]:
    """Every kernel that the target's programs need, and the phases of a step that need it."""
    return status.closure(target.facts, target.quant, target.hardware.kind, status.has_kernel(target), target.stored)


def build(
    root: Path,
    selected: Sequence[Target],
    jobs: int,
    report: Callable[[str], None],
    selection: Mapping[str, str] | None = None,
) -> tuple[Manifest, bytes]:
    """Compile the targets. Returns the manifest and the blob of device images it refers to.

    Raises BuildError, beside what compiling may raise, where a target's kernels disagree about a buffer's layout.

    selection: the variables that selected them, for the manifest; by default those of this process.
    """
    if selection is None:
        selection = {name: os.environ[name] for name in targets.VARIABLES if name in os.environ}
    recorded = {**selection, "targets": ",".join(target.name for target in selected)}
    blob = ImageBlob()
    gpu = [target for target in selected if target.hardware.kind != "cpu"]
    wanted = [(target, closure(target), target.hardware.arch) for target in gpu]
    entries = _compile_all(root, wanted, jobs, blob, report, _check_layouts) if gpu else []
    by_target = dict(zip((target.name for target in gpu), entries, strict=True))
    sets = []
    for target in selected:
        if target.hardware.kind == "cpu":
            sets.append(_cpu_set(root, target))
            continue
        shape_hash = family_of(target.facts).configure(target.facts, Shard()).shape.hash()
        hardware, kernels = target.hardware, by_target[target.name]
        sets.append(
            KernelSet(
                hardware.name,
                "cuda",
                target.model,
                target.quant,
                shape_hash,
                hardware.arch,
                hardware.compute_capability,
                kernels,
            )
        )
        report(f"{target.name}: {len(kernels)} kernels for {hardware.arch}, shape {shape_hash}")
    compiler = "host"
    flags: tuple[str, ...] = ()
    if gpu:
        from atlas.build import cuda

        compiler, flags = cuda.compiler_version(), cuda.OPTIONS
    return Manifest(tuple(sets), tuple(blob.images), compiler, flags=flags, selection=recorded), bytes(blob.data)


def _check_layouts(target: Target, kernels: Sequence[KernelEntry]) -> None:
    family, kind = family_of(target.facts), target.hardware.kind
    config = family.configure(target.facts, Shard())
    programs = fusion.record(family, config, recipe(target.quant, kind), kind, has=status.has_kernel(target))
    memory_plan.buffer_layouts(programs, {kernel.name: kernel for kernel in kernels})


def embed_choice(environment: Mapping[str, str] = os.environ) -> str:
    """What `ATLAS_EMBED` asks for: cubin (if unset), ptx or both. Raises BuildError on another value."""
    choice = environment.get(EMBED_VARIABLE) or "cubin"
    if choice not in EMBED_CHOICES:
        raise BuildError(EMBED_VARIABLE, repr(choice), "; ".join(f"{k}: {v}" for k, v in EMBED_CHOICES.items()))
    return choice


class ImageBlob:
    """Device images one after another, each stored once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.images: list[Image] = []
        self._index: dict[str, int] = {}

    def add(self, image: bytes) -> int:
        """Index of the image, which starts 64-byte aligned in the blob."""
        sha256 = hashlib.sha256(image).hexdigest()
        if sha256 not in self._index:
            self._index[sha256] = len(self.images)
            self.data.extend(bytes(-len(self.data) % 64))
            self.images.append(Image(len(self.data), len(image), sha256))
            self.data.extend(image)
        return self._index[sha256]


def compile_keys(
    root: Path, target: Target, keys: Mapping[KernelKey, tuple[str, ...]], arch: str, jobs: int, blob: ImageBlob
) -> tuple[KernelEntry, ...]:
    """Compile kernels of one CUDA target for `arch`, `jobs` at a time. keys: each with the phases that need it.

    Raises:
        BuildError: an op without a kernel, a compile error, or a kernel that fails a check
            (atlas/build/kernel_job.py).
    """
    return _compile_all(root, [(target, keys, arch)], jobs, blob, lambda _: None)[0]


def _compile_all(
    root: Path,
    wanted: Sequence[tuple[Target, Mapping[KernelKey, tuple[str, ...]], str]],
    jobs: int,
    blob: ImageBlob,
    report: Callable[[str], None],
    check: Callable[[Target, Sequence[KernelEntry]], None] = lambda target, kernels: None,
) -> list[tuple[KernelEntry, ...]]:
    """Entries of several targets' kernels. What targets share is compiled once. check: called with a target's kernels
    while they are being compiled."""
    from atlas.build import kernel_job

    embed = embed_choice()
    with kernel_job.Compiler(jobs) as compiler:
        planned = []
        for target, keys, arch in wanted:
            planned.append([compiler.plan(root, target, key, arch, phases) for key, phases in keys.items()])
            for variants in planned[-1]:
                for job in variants:
                    compiler.start(job)
        for (target, _, _), kernels_of_target in zip(wanted, planned, strict=True):
            check(target, [kernel_job.planned_entry(variants) for variants in kernels_of_target])
        entries = []
        for kernels_of_target in planned:
            # In the keys' order, whichever thread was done first: the same build gives the same bytes.
            mine = []
            for variants in kernels_of_target:
                done = [(job, compiler.result(job)) for job in variants]
                mine.append(kernel_job.entry(done, blob.add, embed))
            entries.append(tuple(mine))
        new = len(compiler.compiled)
        report(f"{compiler.distinct} different kernels, {new} compiled, {compiler.distinct - new} from the cache")
    for arch in sorted({arch for _, _, arch in wanted}) if embed != "cubin" else ():
        virtual = architecture.parse(arch).ptx
        report(f"{EMBED_VARIABLE}={embed}: {virtual} PTX runs on {architecture.where(virtual)}")
    return entries


def _cpu_set(root: Path, target: Target) -> KernelSet:
    """The CPU kernel set of one quant: checked to serve every known model's program."""
    signatures: dict[str, KernelEntry] = {}
    for op in OPS:
        try:
            path = targets.resolve(target, op)
        except MissingKernel:
            continue  # an op of programs that are recorded for GPUs; below it is missed if a CPU's program has it
        declared = kernel_file.declaration(path)
        for signature in kernel_file.cpu_signatures(path):
            signatures[signature] = KernelEntry(
                name=signature,
                op=op,
                contract=OPS[op].contract_hash(),
                source=path.relative_to(root).as_posix(),
                layouts=declared.layouts_of({o.name: "" for o in OPS[op].operands}, target.hardware.layouts),
            )
    for model, facts in targets.models(root).items():
        for key in closure(dataclasses.replace(target, model=model, facts=facts)):
            if key.signature() not in signatures:
                raise BuildError(
                    f"op {key.op}",
                    f"no instance {key.signature()} for {target.name} of {model}",
                    ", ".join(s for s in signatures if s.startswith(key.op + ".")) or "none",
                )
    # Every instance, needed by a known model or not: a checkpoint may mix formats per tensor, and all are linked in.
    return KernelSet("cpu", "cpu", ANY_MODEL, target.quant, "*", "", (0, 0), tuple(signatures.values()))


def write(folder: Path, manifest: Manifest, blob: bytes) -> None:
    """Write `manifest.json` and `images.bin`, leaving unchanged files alone so that nothing relinks."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs: Mapping[str, bytes] = {"manifest.json": manifest.to_json().encode(), "images.bin": blob}
    for name, data in outputs.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            write_atomic(path, data, 0o644)
