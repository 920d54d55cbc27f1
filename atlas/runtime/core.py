"""The `cpu` and `cuda` backends: a thin wrapper over the C++ core."""

from __future__ import annotations

import functools
import logging
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas.build import manifest
from atlas.build.kernel_file import phase_number
from atlas.errors import BuildError
from atlas.runtime import host
from atlas.runtime.backend import Array, Backend, BoundProgram
from atlas.runtime.extension import extension as extension
from atlas.runtime.memory_plan import MemoryPlan
from atlas.runtime.program import Launch
from atlas.runtime.step import COUNTS, HEADER_WORDS, PHASE_WORD, STEP_VERSION, SYMBOLS

log = logging.getLogger(__name__)

_ROW_SYMBOLS = ("n_logits", "n_rows")
"""The count that chooses among a launch's variants: the first of these that it has."""

_ANY_PHASE = phase_number("")

_POISON = 0xFF
"""With ATLAS_POISON=1, every byte of the workspace when a step begins: a NaN in every float format, -1 in int32. A
kernel that reads what no kernel of its step wrote then shows in the text."""


def embedded() -> tuple[manifest.Manifest, list[memoryview]]:
    """The kernel sets compiled into this install, and their device images."""
    core = extension()
    return manifest.from_json(core.embedded_manifest().decode(), core.embedded_images(), "atlas._core")


def _variants(launch: Launch, entry: manifest.KernelEntry, plan: MemoryPlan) -> list[dict[str, Any]]:
    """A launch's kernels as the core takes them: of the phases whose kernels it runs. Over logits, of which a prompt's
    step has as few as a decoding one, decode kernels serve both: a row's bits must not depend on which it is.

    Raises:
        BuildError: there are none.
    """
    variants = [
        {
            "phase": variant.phase,
            "max_rows": variant.max_rows,
            "kernel": variant.symbol or entry.name,
            "image": variant.image,
            "grid": [list(axis) for axis in variant.grid],
            "block": variant.block,
            "shared": variant.shared,
            "cluster": variant.cluster,
            "pdl": variant.pdl,
            "cooperative": variant.cooperative,
            "arguments": [_word(launch, name, entry.name) for name in variant.arguments],
            "scratch": plan.offsets.get(f"scratch.{variant.symbol}"),
        }
        for variant in entry.variants or (manifest.KernelVariant(),)
    ]
    kept = [variant for variant in variants if variant["phase"] in (_ANY_PHASE, *map(phase_number, launch.phases))]
    if not kept:
        found = f"is for other steps than launch {launch.name} is made in"
        raise BuildError(f"kernel {entry.name}", found, f"a kernel for {' or '.join(launch.phases)} steps")
    return [{**variant, "phase": _ANY_PHASE} for variant in kept] if launch.over_logits else kept


def _word(launch: Launch, constant: str, kernel: str) -> int:
    """The 32 bits of a constant as a kernel takes it: a float or an int. Raises BuildError if there is none."""
    constants = dict(launch.key.constants)
    if constant not in constants:
        raise BuildError(f"kernel {kernel}", f"takes a constant {constant!r}", ", ".join(constants) or "none")
    kind = "f" if constant in launch.op.float_constants else "i"
    try:
        (word,) = struct.unpack("<I", struct.pack(f"<{kind}", constants[constant]))
    except (struct.error, OverflowError):
        found = f"takes a constant {constant} of {constants[constant]!r}"
        raise BuildError(f"kernel {kernel}", found, "a number of 32 bits") from None
    return int(word)


def _uses_workspace(program: BoundProgram) -> bool:
    """Whether launches leave something in buffers of the workspace for each other. The load program does not: where
    they will lie, it keeps rows that arrive before its steps begin."""
    names = {name for launch in program.program.launches for _, name in launch.operands}
    return any(program.buffers[name].kind == "workspace" for name in names if name in program.buffers)


class CoreBackend(Backend):
    """A backend of the C++ core."""

    def __init__(self, name: str, core: Any) -> None:
        self.name, self._core = name, core
        self._programs: dict[int, BoundProgram] = {}
        self._poisoned: tuple[int, int] | None = None  # (offset, bytes)

    def describe(self) -> str:
        return str(self._core.describe())

    def load_images(self, images: Sequence[memoryview]) -> None:
        """Load the device images that kernel entries refer to by index."""
        self._core.load_images(list(images))

    def allocate(self, nbytes: int) -> None:
        self._core.allocate(nbytes)

    def write(self, offset: int, data: Array) -> None:
        self._core.write(offset, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def read(self, offset: int, data: Array) -> None:
        self._core.read(offset, data.reshape(-1).view(np.uint8))

    def fill(self, offset: int, value: int, nbytes: int) -> None:
        self._core.fill(offset, value, nbytes)

    def staging(self, nbytes: int) -> memoryview:
        view: memoryview = self._core.staging(nbytes)
        return view

    def release(self, staging: memoryview) -> None:
        self._core.release(staging)

    def load(self, program: BoundProgram) -> int:
        launches = []
        for launch in program.program.launches:
            entry, buffers = program.entry(launch), dict(launch.operands)
            if entry.contract != launch.op.contract_hash():
                raise BuildError(
                    f"kernel {entry.name}",
                    f"was compiled for contract {entry.contract} of op {entry.op}",
                    launch.op.contract_hash(),
                    "rebuild the kernels with this version of Atlas",
                )
            names = [symbol for _, symbol in launch.dims]
            launches.append(
                {
                    "name": launch.name,
                    "op": launch.key.op,
                    "phase": phase_number(launch.phase),
                    "operands": [
                        program.plan.offsets[buffers[operand.name]] if operand.name in buffers else None
                        for operand in launch.op.operands
                    ],
                    "dims": [1 + SYMBOLS.index(name) for name in names],
                    "constants": [
                        float(value) if name in launch.op.float_constants else int(value)
                        for name, value in launch.key.constants
                    ],
                    "row_dim": next((names.index(name) for name in _ROW_SYMBOLS if name in names), -1),
                    "variants": _variants(launch, entry, program.plan),
                }
            )
        handle: int = self._core.load(launches)
        self._programs[handle] = program
        if os.environ.get("ATLAS_POISON") == "1" and _uses_workspace(program):
            begin, end = program.plan.regions["workspace"]
            self._poisoned = begin, end - begin
        return handle

    def capture(self, handle: int, phase: int, rows: int) -> None:
        program = self._programs[handle]
        limits = program.limits.symbols()
        symbols = {name: min(rows, limit) if name in COUNTS else limit for name, limit in limits.items()}
        header = [0] * HEADER_WORDS
        header[0], header[PHASE_WORD] = STEP_VERSION, phase
        header[1 : 1 + len(SYMBOLS)] = [symbols[name] for name in SYMBOLS]
        self._core.capture(handle, program.plan.offsets["step.header"], header)

    def begin_step(self, offset: int, block: memoryview, nbytes: int) -> None:
        if self._poisoned:
            self._core.fill(self._poisoned[0], _POISON, self._poisoned[1])
        self._core.begin_step(offset, block, nbytes)

    def run(self, handle: int, begin: int, end: int) -> None:
        self._core.run(handle, begin, end)

    def run_on(self, handle: int, index: int, operands: Sequence[int | None]) -> None:
        self._core.run_on(handle, index, operands)

    def run_timed(self, handle: int, begin: int, end: int) -> list[float]:
        """run(), and the seconds that each launch took alone, nothing overlapping it."""
        seconds: list[float] = self._core.run_timed(handle, begin, end)
        return seconds

    def run_seconds(self, handle: int, begin: int, end: int, repeats: int = 1) -> float:
        """run(), `repeats` times; the median of the seconds that all of it took on the device, there as one graph."""
        return float(self._core.run_seconds(handle, begin, end, repeats))

    def read_later(self, offset: int, data: memoryview) -> None:
        self._core.read_later(offset, data)

    def fence(self) -> int:
        return int(self._core.fence())

    def wait(self, ticket: int) -> None:
        self._core.wait(ticket)

    def passed(self, ticket: int) -> bool:
        return bool(self._core.passed(ticket))

    def upload(self, offset: int, data: memoryview) -> int:
        return int(self._core.upload(offset, data))

    def order_runs(self) -> None:
        self._core.order_runs()

    def order_uploads(self) -> None:
        self._core.order_uploads()

    def synchronize(self) -> None:
        self._core.synchronize()


def cpu_backend(threads: int | None = None, level: str = "") -> CoreBackend:
    """The CPU backend: `threads` workers (default: the allowed cores), instruction-set `level` (default: the best).

    A level that fails its self-test on this machine is not used, which is logged.

    Raises:
        DeviceError: no such level, or none that is usable here.
    """
    core = extension()
    cores = host.allowed_cores()
    backend = core.cpu_backend(threads or cores, level, cores)
    _warn_of_failed_levels(core)
    return CoreBackend("cpu", backend)


@functools.cache
def _warn_of_failed_levels(core: Any) -> None:
    """Once per process."""
    for found in core.cpu_level_report():
        if found["failure"]:
            log.warning("cpu level %s fails its self-test and is not used: %s", found["name"], found["failure"])


def cuda_backend(images: Sequence[memoryview], device: int = 0) -> CoreBackend:
    """The CUDA backend on `device`, with device images loaded. Raises DeviceError saying what is missing."""
    backend = CoreBackend("cuda", extension().cuda_backend(device))
    backend.load_images(images)
    return backend
