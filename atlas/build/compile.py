"""Compiles selected targets: programs are recorded, their closure resolved to files, each kernel
specialised and compiled once, and the result described by a manifest."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from atlas.build import kernel_file
from atlas.build.kernel_file import Declaration
from atlas.build.manifest import CORE_ABI, Image, KernelEntry, KernelSet, Manifest
from atlas.errors import BuildError
from atlas.models import family_of
from atlas.ops import OPS
from atlas.runtime.program import KernelKey
from atlas.targets import target as targets
from atlas.targets.hardware import Hardware
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from atlas.targets.target import ANY_MODEL, Target

_INCLUDE = re.compile(r'^\s*#\s*include\s+"(atlas/[^"]+)"', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its image and what ptxas said about it."""

    image: bytes
    registers: int
    spills: int
    stack: int
    static_shared: int


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/atlas/kernels`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atlas" / "kernels"


def closure(target: Target) -> list[KernelKey]:
    """Every kernel that the target's programs need."""
    family = family_of(target.facts)
    return family.record(family.configure(target.facts, Shard()), recipe(target.quant)).closure()


SELECTION_VARIABLES = ("ATLAS_TARGET_HW", "ATLAS_TARGET_MODEL", "ATLAS_TARGET_QUANT")


def build(
    root: Path,
    selected: Sequence[Target],
    jobs: int,
    report: Callable[[str], None],
    selection: Mapping[str, str] | None = None,
) -> tuple[Manifest, bytes]:
    """Compile the targets. Returns the manifest and the blob of device images it refers to.

    selection: the variables that selected them, for the manifest; by default those of this process.
    """
    if selection is None:
        selection = {name: os.environ[name] for name in SELECTION_VARIABLES if name in os.environ}
    recorded = {**selection, "targets": ",".join(target.name for target in selected)}
    blob = ImageBlob()
    sets = []
    compiler = "host"
    for target in selected:
        if target.hardware.kind == "cpu":
            sets.append(_cpu_set(root, target))
            continue
        from atlas.build import cuda

        compiler = cuda.compiler_version()
        family = family_of(target.facts)
        shape_hash = family.configure(target.facts, Shard()).shape.hash()
        arch = target.hardware.arch
        kernels = compile_keys(root, target, closure(target), arch, jobs, blob)
        sets.append(
            KernelSet(
                target.hardware.name,
                "cuda",
                target.model,
                target.quant,
                shape_hash,
                arch,
                target.hardware.compute_capability,
                kernels,
            )
        )
        report(f"{target.name}: {len(kernels)} kernels for {arch}, shape {shape_hash}")
    return Manifest(tuple(sets), tuple(blob.images), compiler, selection=recorded), bytes(blob.data)


class ImageBlob:
    """Device images one after another, each stored once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.images: list[Image] = []

    def add(self, image: bytes) -> int:
        """Index of the image, which starts 64-byte aligned in the blob."""
        sha256 = hashlib.sha256(image).hexdigest()
        for index, known in enumerate(self.images):
            if known.sha256 == sha256:
                return index
        self.data.extend(bytes(-len(self.data) % 64))
        self.images.append(Image(len(self.data), len(image), sha256))
        self.data.extend(image)
        return len(self.images) - 1


def compile_keys(
    root: Path, target: Target, keys: Iterable[KernelKey], arch: str, jobs: int, blob: ImageBlob
) -> tuple[KernelEntry, ...]:
    """Compile kernels of one CUDA target for `arch`, `jobs` at a time.

    Raises:
        BuildError: an op without a kernel, a compile error, undeclared spills, or more shared memory
            than the hardware has.
    """
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        compiled = pool.map(lambda key: _compile_one(root, target, key, arch), keys)
        # In the keys' order, whichever thread was done first: the same build gives the same bytes.
        return tuple(dataclasses.replace(entry, image=blob.add(image)) for entry, image in compiled)


def _compile_one(root: Path, target: Target, key: KernelKey, arch: str) -> tuple[KernelEntry, bytes]:
    """The manifest entry of one kernel, still without the place of its image, and the image."""
    from atlas.build import cuda

    path = targets.resolve(target, key.op)
    declared = kernel_file.declaration(path)
    knobs = {**declared.knobs, **_checked_tuning(target, declared)}
    grid, block, shared = declared.geometry(dict(key.constants), knobs)
    symbol = f"atlas_{key.name()}"
    source = path.read_text()
    headers = include_closure(source, target.hardware, root)
    instance = cuda.instance_header(key, symbol, knobs, block)
    digest = _digest(
        arch, cuda.compiler_version(), *cuda.OPTIONS, path.name, source, instance, *sorted(headers.items())
    )
    compiled = _cached(
        digest, lambda: cuda.compile_kernel(path.name, source, {**headers, cuda.INSTANCE_HEADER: instance}, arch)
    )
    where = f"{path} for {target.name} ({key.name()})"
    if compiled.spills > declared.spills:
        raise BuildError(
            where, f"{compiled.spills} bytes of register spills", f"at most {declared.spills} ([limits] spills)"
        )
    limit = target.hardware.shared_memory_per_block
    if shared + compiled.static_shared > limit:
        raise BuildError(where, f"{shared + compiled.static_shared} bytes of shared memory", f"at most {limit}")
    entry = KernelEntry(
        name=key.name(),
        op=key.op,
        contract=OPS[key.op].contract_hash(),
        source=path.relative_to(root).as_posix(),
        layouts=dict(declared.layouts),
        symbol=symbol,
        grid=tuple((axis.dim, axis.divisor, axis.multiplier) for axis in grid),
        block=block,
        shared=shared,
        registers=compiled.registers,
        spills=compiled.spills,
        stack=compiled.stack,
        static_shared=compiled.static_shared,
        source_hash=digest,
    )
    return entry, compiled.image


def _checked_tuning(target: Target, declared: Declaration) -> dict[str, int]:
    tuned = targets.tuning(target, declared.op)
    for knob in tuned:
        if knob not in declared.knobs:
            raise BuildError(
                f"tuning.toml of {target.name}", f"[{declared.op}] sets {knob!r}", ", ".join(declared.knobs)
            )
    return tuned


def include_closure(source: str, hardware: Hardware, root: Path) -> dict[str, str]:
    """Text of every `#include "atlas/..."` that `source` reaches, nearest hardware first."""
    folders = [directory / "include" for directory in hardware.chain] + [root / "include"]
    found: dict[str, str] = {}
    pending = _INCLUDE.findall(source)
    while pending:
        name = pending.pop()
        if name in found or name == "atlas/instance.h":
            continue
        file = next((folder / name for folder in folders if (folder / name).exists()), None)
        if file is None:
            raise BuildError(f'#include "{name}"', "no such header", ", ".join(map(str, folders)))
        found[name] = file.read_text()
        pending += _INCLUDE.findall(found[name])
    return found


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([CORE_ABI, *map(str, parts)]).encode()).hexdigest()


def _cached(digest: str, compile_now: Callable[[], Compiled]) -> Compiled:
    """The compile result stored under `digest`, or a new one. Files appear whole, by rename."""
    folder = cache_folder()
    facts, image = folder / f"{digest}.json", folder / f"{digest}.cubin"
    try:
        stored = json.loads(facts.read_text())
        data = image.read_bytes()
        if hashlib.sha256(data).hexdigest() == stored.pop("sha256"):
            return Compiled(data, **stored)
    except (OSError, ValueError, TypeError, KeyError):
        pass  # absent or damaged: compile again
    result = compile_now()
    folder.mkdir(parents=True, exist_ok=True)
    record = {k: v for k, v in dataclasses.asdict(result).items() if k != "image"}
    record["sha256"] = hashlib.sha256(result.image).hexdigest()
    _write_atomically(image, result.image)
    _write_atomically(facts, json.dumps(record).encode())
    return result


def _write_atomically(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
    os.replace(temporary, path)


def _cpu_set(root: Path, target: Target) -> KernelSet:
    """The CPU kernel set of one quant: checked to serve every known model's program."""
    signatures: dict[str, KernelEntry] = {}
    for op in OPS:
        path = targets.resolve(target, op)
        declared = kernel_file.declaration(path)
        for signature in kernel_file.cpu_signatures(path):
            signatures[signature] = KernelEntry(
                name=signature,
                op=op,
                contract=OPS[op].contract_hash(),
                source=path.relative_to(root).as_posix(),
                layouts=dict(declared.layouts),
            )
    needed: dict[str, None] = {}
    for model, facts in targets.models(root).items():
        for key in closure(dataclasses.replace(target, model=model, facts=facts)):
            if key.signature() not in signatures:
                raise BuildError(
                    f"op {key.op}",
                    f"no instance {key.signature()} for {target.name} of {model}",
                    ", ".join(s for s in signatures if s.startswith(key.op + ".")) or "none",
                )
            needed[key.signature()] = None
    kernels = tuple(signatures[signature] for signature in needed)
    return KernelSet("cpu", "cpu", ANY_MODEL, target.quant, "*", "", (0, 0), kernels)


def write(folder: Path, manifest: Manifest, blob: bytes) -> None:
    """Write `manifest.json` and `images.bin`, leaving unchanged files alone so that nothing relinks."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs: Mapping[str, bytes] = {"manifest.json": manifest.to_json().encode(), "images.bin": blob}
    for name, data in outputs.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            _write_atomically(path, data)
