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
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from atlas.build import cuda, inspect, kernel_cache, kernel_file, knobs
from atlas.build.geometry import Geometry
from atlas.build.kernel_cache import Compiled
from atlas.build.kernel_file import Declaration
from atlas.build.knobs import Chosen
from atlas.build.manifest import CORE_ABI, KernelEntry, KernelVariant
from atlas.cache import private_folder
from atlas.errors import BuildError
from atlas.ops import OPS
from atlas.runtime.program import KernelKey
from atlas.targets import target as targets
from atlas.targets.hardware import Hardware
from atlas.targets.target import Target

_BOUND = "launch::max_rows"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"(atlas/[^"]+)"', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Job:
    """A variant of a kernel to compile, and what its entry will say.

    max_rows: most rows, 0 for any number.  symbol: of the kernel in its image.
    digest: hash of all that decides the image: variants that have it in common are one image.
    """

    target: Target
    key: KernelKey
    path: Path
    source_name: str
    declared: Declaration
    max_rows: int
    layouts: Mapping[str, str]
    chosen: Chosen
    geometry: Geometry
    arch: str
    source: str
    headers: Mapping[str, str]
    symbol: str
    digest: str

    @property
    def where(self) -> str:
        words = " ".join([self.key.name(), *knobs.variant_words(self.declared.phase, self.max_rows)])
        return f"{self.path} for {self.target.name} ({words})"


def plan(root: Path, target: Target, key: KernelKey, arch: str, phases: Sequence[str]) -> list[Job]:
    """The variants of a kernel that are to be compiled for steps of `phases`.

    Raises:
        BuildError: no kernel, a wrong declaration or tuning, a launch that the hardware cannot make, or variants
            that want an operand in different layouts.
    """
    jobs = []
    dtypes, constants = dict(key.dtypes), dict(key.constants)
    for path in dict.fromkeys(targets.resolve(target, key.op, phase, dtypes, constants) for phase in phases):
        declared = kernel_file.declaration(path)
        jobs += [plan_variant(root, target, key, arch, declared, max_rows) for max_rows in declared.bounds]
    for job in jobs[1:]:
        if job.layouts != jobs[0].layouts:
            operand = next(o for o, _ in key.dtypes if job.layouts.get(o) != jobs[0].layouts.get(o))
            found = (f"{j.layouts.get(operand, kernel_file.ROW_MAJOR)} in {j.path}" for j in (jobs[0], job))
            raise BuildError(f"kernel {key.name()}", f"operand {operand} is {' and '.join(found)}", "one layout")
    return jobs


def plan_variant(
    root: Path,
    target: Target,
    key: KernelKey,
    arch: str,
    declared: Declaration,
    max_rows: int,
    chosen: Chosen | None = None,
) -> Job:
    """What is to be compiled for one variant. Raises as `plan`.

    chosen: knob values to use instead of the target's own.
    """
    path, hardware = declared.path, target.hardware
    chosen = chosen or knobs.choose(declared, key, target, max_rows)
    geometry = declared.geometry(knobs.names(key, hardware, max_rows), chosen.values)
    layouts = declared.layouts_of(dict(key.dtypes), hardware.layouts)
    source_name, source = path.relative_to(root).as_posix(), path.read_text()
    job = Job(target, key, path, source_name, declared, max_rows, layouts, chosen, geometry, arch, source, {}, "", "")
    if not 0 < geometry.block <= knobs.MOST_THREADS or geometry.block % 32:
        raise BuildError(
            job.where, f"{geometry.block} threads per block", f"a multiple of 32, at most {knobs.MOST_THREADS}"
        )
    _check_cluster(job)
    headers = include_closure(source, hardware, root)
    launch = {
        "block": geometry.block,
        "shared": geometry.shared,
        "cluster": geometry.cluster,
        "phase": kernel_file.phase_number(declared.phase),
        "resident": geometry.resident,
    }
    # Bounds that a kernel knows only by what its knobs are for them often have the same knobs.
    bounded = any(_BOUND in text for text in (source, *headers.values()))
    if bounded:
        launch["max_rows"] = max_rows
    words = knobs.variant_words(declared.phase, max_rows if bounded else 0)
    compiled_for = dataclasses.replace(
        key, constants=tuple((name, value) for name, value in key.constants if name not in declared.arguments)
    )
    symbol = "__".join([f"atlas_{compiled_for.name()}", *words])
    headers[cuda.INSTANCE_HEADER] = cuda.instance_header(compiled_for, symbol, chosen.values, launch, layouts)
    digest = _digest(arch, cuda.compiler_version(), *cuda.OPTIONS, path.name, source, *sorted(headers.items()))
    return dataclasses.replace(job, headers=headers, symbol=symbol, digest=digest)


def _check_cluster(job: Job) -> None:
    if job.geometry.resident < 1:
        raise BuildError(job.where, f"[launch] resident is {job.geometry.resident}", "a number of blocks, 1 or more")
    cluster, axis = job.geometry.cluster, job.geometry.grid[0]
    most = job.target.hardware.cluster_blocks
    if not 1 <= cluster <= most:
        raise BuildError(job.where, f"a cluster of {cluster} blocks", f"1..{most} on {job.target.hardware.name}")
    if axis.multiplier % cluster:
        raise BuildError(
            job.where, f"grid axis x has {axis.multiplier} blocks for a cluster of {cluster}", "a multiple of it"
        )


class Compiler:
    """Plans and compiles jobs, `workers` at a time, each digest once. `compiled` counts what the cache did not have."""

    def __init__(self, workers: int) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)
        self._planned: dict[Hashable, list[Job]] = {}
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

    def plan(self, root: Path, target: Target, key: KernelKey, arch: str, phases: Sequence[str]) -> list[Job]:
        """As the function `plan`, once for all targets that have the same files and tuning: two of three, mostly."""
        dtypes, constants = dict(key.dtypes), dict(key.constants)
        files = tuple(targets.resolve(target, key.op, phase, dtypes, constants) for phase in phases)
        tuning = json.dumps(targets.tuning(target, key.op))
        same = (root, target.hardware.name, arch, key, files, tuning)
        if same not in self._planned:
            self._planned[same] = plan(root, target, key, arch, phases)
        return [dataclasses.replace(job, target=target) for job in self._planned[same]]

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
        BuildError: undeclared spills, too much shared memory, other parameters than a launch passes, an input never
            read or an output never written, or more time to compile than its budget.
    """
    declared, hardware = job.declared, job.target.hardware
    if compiled.spills > declared.spills:
        raise BuildError(
            job.where,
            f"{compiled.spills} bytes of register spills",
            f"at most {declared.spills} ([limits] spills)",
        )
    dynamic = job.geometry.shared
    shared = dynamic + compiled.static_shared
    if shared > hardware.shared_memory_per_block:
        raise BuildError(
            job.where,
            f"{shared} bytes of shared memory ({dynamic} dynamic, {compiled.static_shared} static)",
            f"at most {hardware.shared_memory_per_block} on {hardware.name}",
        )
    op, given = OPS[job.key.op], dict(job.key.dtypes)
    ptx, scratch = compiled.ptx.decode(), job.geometry.scratch > 0
    inspect.check_parameters(op, declared.arguments, ptx, job.where, scratch=scratch)
    inspect.check(op, compiled.reads, compiled.writes, declared.unread, job.where, given)
    if compiled.seconds > declared.seconds:
        raise BuildError(
            job.where,
            f"took {compiled.seconds:.1f} s of processor time to compile",
            f"at most {declared.seconds:g} ([limits] seconds)",
            "make it smaller (unrolling, templates), or declare a larger budget",
        )


def planned_entry(jobs: Sequence[Job], name: str = "") -> KernelEntry:
    """The manifest entry of one kernel as far as it is known before its variants are compiled."""
    first = jobs[0]
    return KernelEntry(
        name=name or first.key.name(),
        op=first.key.op,
        contract=OPS[first.key.op].contract_hash(),
        layouts=dict(first.layouts),
    )


def entry(
    variants: Sequence[tuple[Job, Compiled]], add_image: Callable[[bytes], int], embed: str, name: str = ""
) -> KernelEntry:
    """The manifest entry of one kernel from all of its variants, each checked. `embed`: cubin, ptx or both."""
    for job, compiled in variants:
        check(job, compiled)
    return dataclasses.replace(
        planned_entry([job for job, _ in variants], name),
        variants=tuple(_variant(job, compiled, add_image, embed) for job, compiled in variants),
    )


def _variant(job: Job, compiled: Compiled, add_image: Callable[[bytes], int], embed: str) -> KernelVariant:
    return KernelVariant(
        phase=kernel_file.phase_number(job.declared.phase),
        max_rows=job.max_rows,
        source=job.source_name,
        image=add_image(compiled.image) if embed != "ptx" else -1,
        ptx=add_image(compiled.ptx) if embed != "cubin" else -1,
        symbol=job.symbol,
        grid=tuple((axis.dim, axis.divisor, axis.multiplier) for axis in job.geometry.grid),
        block=job.geometry.block,
        shared=job.geometry.shared,
        cluster=job.geometry.cluster,
        pdl=job.declared.pdl,
        cooperative=job.declared.cooperative,
        arguments=job.declared.arguments,
        scratch=job.geometry.scratch,
        registers=compiled.registers,
        spills=compiled.spills,
        stack=compiled.stack,
        static_shared=compiled.static_shared,
        source_hash=job.digest,
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
