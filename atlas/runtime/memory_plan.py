"""Memory plan: one arena, weights | state | step blocks, deliveries and results | scratch of kernels | workspace.

Workspace buffers share memory when their lifetimes over the launches of a step do not overlap.
Every byte of the arena has an owner in `MemoryPlan.ledger()`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping

from atlas.build.kernel_file import ROW_MAJOR
from atlas.build.manifest import KernelEntry
from atlas.errors import BuildError
from atlas.runtime import step
from atlas.runtime.program import Buffer, StepPrograms
from atlas.targets import formats

ALIGNMENT = 256
"""Start of every buffer: enough for any vector load and for TMA (128)."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Where each buffer lies. offsets, sizes: bytes; regions: region -> (begin, end).

    places: offsets of the step block's fields, of what is delivered and of the results, once for each step that may be
    in flight; `offsets` has those of the first.
    """

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    regions: Mapping[str, tuple[int, int]]
    total: int
    places: tuple[Mapping[str, int], ...]

    def at(self, place: int) -> MemoryPlan:
        """The plan for steps that use the given place."""
        return dataclasses.replace(self, offsets={**self.offsets, **self.places[place]})

    def ledger(self) -> list[tuple[str, int]]:
        """(region, bytes) in order; the sum is `total`."""
        return [(name, end - begin) for name, (begin, end) in self.regions.items()]

    def owners(self, buffers: Mapping[str, Buffer]) -> list[tuple[str, int]]:
        """(owner, bytes), largest first, of every byte: weights by format, state by kind, the rest by region.

        The sum is `total`.
        """
        found: collections.Counter[str] = collections.Counter()
        for region, size in self.ledger():
            inside = 0
            for buffer in buffers.values():
                if buffer.kind == {"weights": "weight", "state": "state"}.get(region):
                    owner = f"weights {buffer.dtype}" if region == "weights" else buffer.name.rpartition(".")[2]
                    found[owner] += self.sizes[buffer.name]
                    inside += self.sizes[buffer.name]
            found["alignment" if inside else region] += size - inside
        return [(owner, size) for owner, size in found.most_common() if size]


def _align(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


SCRATCH = "scratch"


def buffer_layouts(programs: StepPrograms, kernels: Mapping[str, KernelEntry]) -> dict[str, str]:
    """Storage layout of each buffer that a launch touches: what the kernels declare, who must agree.

    Raises:
        BuildError: two kernels that want different ones, or one that wants the host's step block not row-major.
    """
    layouts: dict[str, str] = {}
    first: dict[str, str] = {}
    for launch in programs.launches():
        entry = kernels.get(launch.key.name()) or kernels.get(launch.key.signature())
        for operand, name in launch.operands:
            layout = entry.layouts.get(operand, ROW_MAJOR) if entry else ROW_MAJOR
            where = f"kernel {launch.key.name()} of launch {launch.name}"
            if programs.buffers[name].kind in ("step", "result", "delivery"):
                layouts[name], first[name] = ROW_MAJOR, "the host"
            if layouts.setdefault(name, layout) != layout:
                raise BuildError(
                    f"{programs.buffers[name].kind} {name}",
                    f"{first[name]} has layout {layouts[name]}, {where} has {layout}",
                    "one layout in all kernels that touch a buffer ([layouts] of their files)",
                )
            first.setdefault(name, where)
    return layouts


def scratch_of(programs: StepPrograms, kernels: Mapping[str, KernelEntry]) -> dict[str, int]:
    """Symbol -> bytes of scratch, of every kernel of the programs that has some."""
    found: dict[str, int] = {}
    for key in programs.closure():
        entry = kernels.get(key.name())
        for variant in entry.variants if entry else ():
            if variant.scratch:  # variants that share an image may differ in it
                found[variant.symbol] = max(variant.scratch, found.get(variant.symbol, 0))
    return found


SHARED_SCRATCH = frozenset(
    {
        "linear",
        "gated_linear",
        "residual_linear",
        "normed_linear",
        "normed_logits",
        "normed_gated_linear",
        "normed_qkv_append",
    }
)
"""Ops whose kernels leave scratch as they find it, all zeros, so that one place serves all of them. It is many
megabytes for each product, and what the last one touched is still in the device's cache."""


def shares(programs: StepPrograms, kernels: Mapping[str, KernelEntry]) -> frozenset[str]:
    """Symbols of the kernels that share a place in scratch."""
    names = {key.name() for key in programs.closure() if key.op in SHARED_SCRATCH}
    return frozenset(variant.symbol for name in names & kernels.keys() for variant in kernels[name].variants)


def plan(
    programs: StepPrograms,
    limits: step.Limits,
    physical_sizes: Mapping[str, int],
    scratch: Mapping[str, int] | None = None,
    places: int = 1,
    shared: Collection[str] = (),
) -> MemoryPlan:
    """Plan the arena.

    Args:
        physical_sizes: bytes of buffers whose layout on the device is not row-major.
        scratch: of kernels, by symbol (`scratch_of`); it must be zeroed at load.
        places: for the step block, deliveries and results, so that copies of one step run beside the next step.
        shared: symbols of kernels that share a place in scratch (`shares`).
    """
    symbols = limits.symbols()

    def size_of(buffer: Buffer) -> int:
        logical = formats.nbytes(buffer.dtype, buffer.extents(symbols))
        return physical_sizes.get(buffer.name, logical)

    offsets: dict[str, int] = {}
    sizes = {buffer.name: size_of(buffer) for buffer in programs.buffers.values()}
    regions: dict[str, tuple[int, int]] = {}
    cursor = 0

    def place(region: str, kind: str) -> None:
        nonlocal cursor
        begin = cursor
        for buffer in programs.buffers.values():
            if buffer.kind == kind:
                offsets[buffer.name] = cursor
                cursor = _align(cursor + sizes[buffer.name])
        regions[region] = (begin, cursor)

    place("weights", "weight")
    place("state", "state")
    field_offsets, step_bytes = step.offsets(limits)
    begin = cursor
    of_steps: list[Mapping[str, int]] = []
    for _ in range(places):
        of_step = {f"step.{field}": cursor + offset for field, offset in field_offsets.items()}
        cursor = _align(cursor + step_bytes)
        for buffer in programs.buffers.values():
            if buffer.kind in ("delivery", "result"):
                of_step[buffer.name] = cursor
                cursor = _align(cursor + sizes[buffer.name])
        of_steps.append(of_step)
    offsets |= of_steps[0]
    regions["step"] = (begin, cursor)

    begin = cursor
    scratch = scratch or {}
    cursor = _align(cursor + max((size for symbol, size in scratch.items() if symbol in shared), default=0))
    for symbol, size in scratch.items():
        offsets[f"{SCRATCH}.{symbol}"] = begin if symbol in shared else cursor
        if symbol not in shared:
            cursor = _align(cursor + size)
    regions[SCRATCH] = (begin, cursor)

    begin = cursor
    placed, workspace_bytes = _place_workspace(programs, sizes)
    for name, offset in placed.items():
        offsets[name] = begin + offset
    cursor = begin + workspace_bytes
    regions["workspace"] = (begin, cursor)
    return MemoryPlan(offsets, sizes, regions, cursor, tuple(of_steps))


def _place_workspace(programs: StepPrograms, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Greedy by size: each buffer at the lowest offset free over its whole lifetime."""
    lifetime: dict[str, tuple[int, int]] = {}
    for index, launch in enumerate(programs.launches()):
        for name in (*launch.reads(), *launch.writes()):
            if programs.buffers[name].kind == "workspace":
                first, _ = lifetime.get(name, (index, index))
                lifetime[name] = (first, index)
    placed: dict[str, int] = {}
    for name in sorted(lifetime, key=lambda n: (-sizes[n], n)):
        first, last = lifetime[name]
        taken = sorted(
            (placed[other], placed[other] + _align(sizes[other]))
            for other in placed
            if lifetime[other][0] <= last and first <= lifetime[other][1]
        )
        offset = 0
        for begin, end in taken:
            if offset + sizes[name] <= begin:
                break
            offset = max(offset, end)
        placed[name] = offset
    return placed, max((placed[name] + _align(sizes[name]) for name in placed), default=0)
