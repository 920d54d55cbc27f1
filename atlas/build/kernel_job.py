"""One CUDA kernel from its file to its manifest entry: planned, compiled or found in the cache, checked.

A plan is everything that decides the image: source, headers it reaches, instance header, architecture,
compiler and options. Its digest is the cache's key, and what two plans of one digest share is compiled
once in a build, also across targets.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from atlas.build import cuda, inspect, kernel_cache, kernel_file, knobs
from atlas.build.kernel_cache import Compiled
from atlas.build.kernel_file import Axis, Declaration
from atlas.build.knobs import Chosen
from atlas.build.manifest import CORE_ABI, KernelEntry
from atlas.cache import private_folder
from atlas.errors import BuildError
from atlas.ops import OPS
from atlas.runtime.program import KernelKey
from atlas.targets import target as targets
from atlas.targets.hardware import Hardware
from atlas.targets.target import Target

_INCLUDE = re.compile(r'^\s*#\s*include\s+"(atlas/[^"]+)"', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Job:
    """A kernel to compile, and what its entry will say. digest: hash of all that decides the image."""

    target: Target
    key: KernelKey
    path: Path
    source_name: str
    declared: Declaration
    chosen: Chosen
    grid: tuple[Axis, ...]
    block: int
    shared: int
    arch: str
    source: str
    headers: Mapping[str, str]
    digest: str

    @property
    def symbol(self) -> str:
        return f"atlas_{self.key.name()}"

    @property
    def where(self) -> str:
        return f"{self.path} for {self.target.name} ({self.key.name()})"


def plan(root: Path, target: Target, key: KernelKey, arch: str, chosen: Chosen | None = None) -> Job:
    """What is to be compiled for `key`. `chosen`: knob values to use instead of the target's own.

    Raises:
        BuildError: no kernel, a wrong declaration or tuning, or a launch that the hardware cannot make.
    """
    path = targets.resolve(target, key.op)
    declared = kernel_file.declaration(path)
    chosen = chosen or knobs.choose(declared, key, target)
    grid, block, shared = declared.geometry(knobs.names(key), chosen.values)
    source = path.read_text()
    headers = include_closure(source, target.hardware, root)
    instance = cuda.instance_header(key, f"atlas_{key.name()}", chosen.values, block)
    headers[cuda.INSTANCE_HEADER] = instance
    digest = _digest(arch, cuda.compiler_version(), *cuda.OPTIONS, path.name, source, *sorted(headers.items()))
    source_name = path.relative_to(root).as_posix()
    job = Job(target, key, path, source_name, declared, chosen, grid, block, shared, arch, source, headers, digest)
    if not 0 < block <= knobs.MOST_THREADS or block % 32:
        raise BuildError(job.where, f"{block} threads per block", f"a multiple of 32, at most {knobs.MOST_THREADS}")
    return job


class Compiler:
    """Compiles jobs, `workers` at a time, each digest once. `compiled` counts what the cache did not have."""

    def __init__(self, workers: int) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)
        self._results: dict[str, concurrent.futures.Future[Compiled]] = {}
        self._folder = private_folder("kernels")
        self.compiled: list[str] = []

    def __enter__(self) -> Compiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure nobody wants the rest.
        self._pool.shutdown(cancel_futures=kind is not None)

    @property
    def distinct(self) -> int:
        """Number of different kernels asked for so far."""
        return len(self._results)

    def start(self, job: Job) -> None:
        """Compile `job` in the background."""
        if job.digest not in self._results:
            self._results[job.digest] = self._pool.submit(self._compile, job)

    def result(self, job: Job) -> Compiled:
        """The compiled kernel of a job that was started, once it is there.

        Raises:
            BuildError: a compile error.
        """
        return self._results[job.digest].result()

    def _compile(self, job: Job) -> Compiled:
        found = kernel_cache.load(self._folder, job.digest)
        if found is None:
            found = cuda.compile_kernel(job.path.name, job.source, job.headers, job.arch)
            self.compiled.append(job.source_name)
            # One that took too long is refused by `check`, and is to be tried again, not remembered.
            if found.seconds <= job.declared.seconds:
                kernel_cache.store(self._folder, job.digest, found)
        return found


def check(job: Job, compiled: Compiled) -> None:
    """What a kernel must hold once it is compiled.

    Raises:
        BuildError: undeclared spills, too much shared memory, an input never read or an output never
            written, or more time to compile than its budget.
    """
    declared, hardware = job.declared, job.target.hardware
    if compiled.spills > declared.spills:
        raise BuildError(
            job.where,
            f"{compiled.spills} bytes of register spills",
            f"at most {declared.spills} ([limits] spills)",
        )
    shared = job.shared + compiled.static_shared
    if shared > hardware.shared_memory_per_block:
        raise BuildError(
            job.where,
            f"{shared} bytes of shared memory ({job.shared} dynamic, {compiled.static_shared} static)",
            f"at most {hardware.shared_memory_per_block} on {hardware.name}",
        )
    given = dict(job.key.dtypes)
    inspect.check(OPS[job.key.op], compiled.reads, compiled.writes, declared.unread, job.where, given)
    if compiled.seconds > declared.seconds:
        raise BuildError(
            job.where,
            f"took {compiled.seconds:.1f} s of processor time to compile",
            f"at most {declared.seconds:g} ([limits] seconds)",
            "make it smaller (unrolling, templates), or declare a larger budget",
        )


def entry(job: Job, compiled: Compiled, add_image: Callable[[bytes], int], embed: str) -> KernelEntry:
    """The manifest entry of a checked kernel. `embed`: cubin, ptx or both."""
    image = add_image(compiled.image) if embed != "ptx" else -1
    ptx = add_image(compiled.ptx) if embed != "cubin" else -1
    return KernelEntry(
        name=job.key.name(),
        op=job.key.op,
        contract=OPS[job.key.op].contract_hash(),
        source=job.source_name,
        layouts=dict(job.declared.layouts),
        image=image,
        symbol=job.symbol,
        grid=tuple((axis.dim, axis.divisor, axis.multiplier) for axis in job.grid),
        block=job.block,
        shared=job.shared,
        registers=compiled.registers,
        spills=compiled.spills,
        stack=compiled.stack,
        static_shared=compiled.static_shared,
        source_hash=job.digest,
        ptx=ptx,
        knobs=dict(sorted(job.chosen.values.items())),
        knobs_from=job.chosen.source,
        seconds=compiled.seconds,
    )


def include_closure(source: str, hardware: Hardware, root: Path) -> dict[str, str]:
    """Text of every `#include "atlas/..."` that `source` reaches, nearest hardware first."""
    folders = [directory / "include" for directory in hardware.chain] + [root / "include"]
    found: dict[str, str] = {}
    pending = _INCLUDE.findall(source)
    while pending:
        name = pending.pop()
        if name in found or name == cuda.INSTANCE_HEADER:
            continue
        file = next((folder / name for folder in folders if (folder / name).exists()), None)
        if file is None:
            raise BuildError(f'#include "{name}"', "no such header", ", ".join(map(str, folders)))
        found[name] = file.read_text()
        pending += _INCLUDE.findall(found[name])
    return found


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([CORE_ABI, *map(str, parts)]).encode()).hexdigest()
