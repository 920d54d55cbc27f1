"""Puts a checkpoint's tensors into the arena, a run of rows at a time (atlas/runtime/weight_runs.py).

For a CPU they are packed one after the other. A GPU takes bytes faster than one thread makes them, so a load is a line
of pinned slots: threads fill the next ones while the device copies from those before them. Rows that it can pack
itself (atlas/runtime/load_program.py) are read as the checkpoint has them, by threads of the core; the rest is packed
by Python's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from atlas.models.family import WeightSource
from atlas.runtime import core, host, load_program
from atlas.runtime.backend import Backend, BoundProgram
from atlas.runtime.device_load import DeviceLoad
from atlas.runtime.uploads import Slot, Uploads
from atlas.runtime.weight_runs import Run, runs
from atlas.weights import Checkpoint
from atlas.weights.layouts import LAYOUTS

READ_BYTES = 16 << 20
"""Of a run that a GPU packs, at most. GB/s of Llama-3-8B's bf16 weights onto an H200 whose link takes 55: 49.5 (24 MB:
49.2, 32: 48.6; 8 MB, for which the main thread is too slow, 47.1)."""

AHEAD, UPLOADING = 2, 2
"""Runs that all threads read together while another is sent, and pinned slots beside theirs: what the device copies
from meanwhile. GB/s onto an H200 in bf16 / fp8 / nvfp4: 49.5 / 48.8 / 48.0; of 3 and 3: 48.1 / 47.6 / 47.4; of 4 and 3:
48.4 / 47.9 / 45.8. Slots cost time to pin."""

MOST_THREADS = 16
"""Threads that read, or that pack for a GPU: each of these holds a few copies of a run."""


def threads() -> int:
    """Threads that fill slots."""
    return min(MOST_THREADS, host.allowed_cores())


def load(
    checkpoint: Checkpoint,
    backend: Backend,
    bound: BoundProgram,
    sources: Mapping[str, WeightSource],
    layouts: Mapping[str, str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Stream every weight buffer into the arena. Returns the bytes written.

    progress: called with the bytes written so far and in all.
    """
    total, written = sum(bound.plan.sizes[name] for name in sources), 0
    if backend.name == "cuda":
        _OntoDevice(checkpoint, backend, bound, sources, layouts, lambda done: progress(done, total)).run()
        return total
    for name, source in sources.items():
        for run in runs(bound, name, source, LAYOUTS[layouts[name]]):
            packed = run.pack(checkpoint)
            backend.write(run.offset, packed)
            written += packed.nbytes
            progress(written, total)
    return written


Fill = Callable[[Run, Slot], Callable[[], object]]
"""Begins to fill a slot with a run; what it returns waits until that is done, or raises what went wrong."""


class _OntoDevice:
    """One load onto a GPU. progress: called with the bytes that weights of so far take."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        bound: BoundProgram,
        sources: Mapping[str, WeightSource],
        layouts: Mapping[str, str],
        progress: Callable[[int], None],
    ) -> None:
        self._checkpoint, self._backend, self._bound, self._progress = checkpoint, backend, bound, progress
        self._sources, self._layouts, self._written = sources, layouts, 0
        largest = max(2 * math.prod(bound.buffers[name].extents({})) for name in sources)
        self._device = DeviceLoad(backend, bound, list(sources), min(READ_BYTES, largest))
        self._numbers = {name: number for number, name in enumerate(sources)}
        self._raw: list[list[Run]] = []  # what the device packs, by the weight's number
        self._packed: list[Run] = []

    def run(self) -> None:
        """What the device packs, then the rest, which is known by then."""
        with (
            contextlib.closing(core.extension().FileReader(threads())) as self._reader,
            concurrent.futures.ThreadPoolExecutor(threads()) as self._pool,
        ):
            uploads = Uploads(self._backend, AHEAD + UPLOADING, self._device.slot_bytes)
            for run, slot in _filled(self._raw_runs(), uploads, AHEAD, self._read):
                rows = load_program.Rows(run.buffer.dtype, run.columns, run.offset, self._numbers[run.buffer.name])
                self._device.send(uploads, slot, rows)
                self._count(run)
            uploads.finish()
            ahead, largest = threads() + 1, max((run.most_bytes for run in self._packed), default=0)
            uploads = Uploads(self._backend, ahead + UPLOADING, largest)
            for run, slot in _filled(self._packed, uploads, ahead, self._pack):
                uploads.send(run.offset, slot)
                self._count(run)
            uploads.finish()
        self._backend.synchronize()
        for number in self._device.faulty():
            for run in self._raw[number]:
                run.refuse(self._checkpoint)

    def _raw_runs(self) -> Iterator[Run]:
        """The runs that the device packs, each weight's when the ones before are on their way."""
        for name, source in self._sources.items():
            layout, columns = LAYOUTS[self._layouts[name]], int(self._bound.buffers[name].extents({})[-1])
            rows = min(self._bound.limits.n_rows, self._device.slot_bytes // (2 * columns))
            whose: tuple[list[Run], list[Run]] = [], []
            for run in runs(self._bound, name, source, layout, rows) if rows else ():
                whose[run.raw(self._checkpoint, self._bound.kernels, rows)].append(run)
            packed, raw = whose
            self._packed += packed if raw else runs(self._bound, name, source, layout)
            self._raw.append(raw)
            if raw and raw[0].padded:
                self._backend.fill(raw[0].start, 0, self._bound.plan.sizes[name])  # rows that nobody writes are zeros
            yield from raw

    def _read(self, run: Run, slot: Slot) -> Callable[[], object]:
        def copy() -> None:
            run.copy(self._checkpoint, slot.view(run.raw_bytes).reshape(run.rows, -1))

        def wait() -> None:
            if not self._reader.wait(ticket):
                copy()  # which says what is wrong

        parts = run.parts(self._checkpoint)
        if not parts:
            return self._pool.submit(copy).result
        ticket = self._reader.read(slot.view(run.raw_bytes), parts)
        return wait

    def _pack(self, run: Run, slot: Slot) -> Callable[[], object]:
        return self._pool.submit(lambda: slot.fill(run.pack(self._checkpoint))).result

    def _count(self, run: Run) -> None:
        self._written += run.most_bytes
        self._progress(self._written)


def _filled(found: Iterable[Run], uploads: Uploads, ahead: int, fill: Fill) -> Iterator[tuple[Run, Slot]]:
    """Each run in a slot, in order; `ahead` of them are being filled while another is used."""
    filling: deque[tuple[Run, Slot, Callable[[], Any]]] = deque()

    def first() -> tuple[Run, Slot]:
        run, slot, wait = filling.popleft()
        wait()
        return run, slot

    for run in found:
        if len(filling) == ahead:
            yield first()
        slot = uploads.take()
        filling.append((run, slot, fill(run, slot)))
    while filling:
        yield first()
