"""Runs of rows: what of a weight is read, converted and packed together, so that it need never be in memory at once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from atlas.build.manifest import KernelEntry
from atlas.errors import BuildError, CheckpointError
from atlas.models.family import WeightSource
from atlas.runtime import load_program
from atlas.runtime.backend import Array, BoundProgram
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.program import Buffer
from atlas.targets.formats import FORMATS
from atlas.weights import Checkpoint
from atlas.weights.checkpoint import TensorInfo
from atlas.weights.layouts import LAYOUTS, Layout
from atlas.weights.quantized import QuantizedArray, concatenate
from atlas.weights.quantizers import quantize_rows, refuse

RUN_BYTES = 16 << 20
"""Of fp32 values that are in memory together while a buffer is loaded, beside a few copies of as many: a
few hundred MB in the worst case, whatever the model's size, and large enough for NumPy to be busy."""

PLAIN = {LAYOUTS[f"{name}_paired"]: LAYOUTS[name] for name in ("tiles", "frag4")}
"""A paired layout -> the one that it is of rows in another order."""
PAIRED = 8
"""Rows of one half that stand together in a paired layout."""


def runs(bound: BoundProgram, name: str, source: WeightSource, layout: Layout, most_rows: int = 0) -> Iterator[Run]:
    """The runs of a buffer, of `most_rows` as `spans` has it."""
    buffer, start = bound.buffers[name], bound.plan.offsets[name]
    for first, taken in spans(buffer.extents({}), layout, most_rows):
        yield Run(buffer, source, layout, start, first, taken)


def spans(shape: tuple[int, ...], layout: Layout, most_rows: int = 0) -> Iterator[tuple[int, list[slice]]]:
    """The first stored row of each run of a buffer, and which rows it has (of both halves, if paired): up to most_rows,
    if a granule is no more; of 0, as many as are packed at once."""
    halves, granule = 2 if layout.paired else 1, layout.row_granule
    run = max(granule, most_rows // granule * granule) if most_rows else rows_at_once(shape, granule)
    run, rows = run // halves, shape[0] // halves
    for begin in range(0, rows, run):
        end = min(begin + run, rows)
        yield halves * begin, [slice(half * rows + begin, half * rows + end) for half in range(halves)]


@dataclasses.dataclass(frozen=True)
class Run:
    """Rows of a buffer that are read, converted and packed together. start: of the buffer in the arena; first: the
    first of its stored rows; spans: which rows they are, of both halves if the layout is paired."""

    buffer: Buffer
    source: WeightSource
    layout: Layout
    start: int
    first: int
    spans: list[slice]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the buffer."""
        return self.buffer.extents({})

    def _nbytes(self, rows: int) -> int:
        return self.layout.nbytes((rows, *self.shape[1:]), self.buffer.dtype)

    @functools.cached_property
    def offset(self) -> int:
        """Where the run goes."""
        return self.start + self._nbytes(self.first)

    @functools.cached_property
    def most_bytes(self) -> int:
        """What it takes at most."""
        return self._nbytes(self.rows)

    @functools.cached_property
    def rows(self) -> int:
        """How many rows the run has."""
        return sum(span.stop - span.start for span in self.spans)

    @functools.cached_property
    def columns(self) -> int:
        """Elements of a row."""
        return int(self.shape[-1])

    @functools.cached_property
    def raw_bytes(self) -> int:
        """What the rows take as the checkpoint has them, if it has them in load_program.SOURCE."""
        return 2 * self.rows * self.columns

    @property
    def padded(self) -> bool:
        """The layout has rows that no row of the buffer fills."""
        return self.shape[0] % self.layout.row_granule != 0

    def raw(self, checkpoint: Checkpoint, kernels: Mapping[str, KernelEntry], most_rows: int) -> bool:
        """Whether the device can make the run of rows that are copied as the checkpoint has them."""
        if len(self.shape) != 2 or self.buffer.dtype not in load_program.FORMATS or self.rows > most_rows:
            return False
        entry = kernels.get(load_program.kernel(self.buffer.dtype, self.columns))
        stored = LAYOUTS[entry.layouts.get("out", "row_major")] if entry else None
        if stored is None or stored is not PLAIN.get(self.layout, self.layout):
            return False
        if self.layout.paired and self.rows % self.layout.row_granule:
            return False  # padding lies between rows
        plain = (self.source.add, self.source.multiply, self.source.values) == (0.0, 1.0, ())
        tensors = [checkpoint.tensors[name] for name in self.source.tensors]
        return plain and all(info.dtype == "BF16" and info.scheme is None for info in tensors)

    def copy(self, checkpoint: Checkpoint, target: Array) -> None:
        """The rows' bytes as the checkpoint has them, in the order in which they are stored, into [rows, row bytes]."""
        for half, span in enumerate(self.spans):
            first = 0
            for tensor, rows in _parts(self.buffer, self.source, span):
                end = first + rows.stop - rows.start
                checkpoint.read_into(tensor, rows, list(self._places(target, half, first, end)))
                first = end

    def _places(self, target: Array, half: int, first: int, end: int) -> Iterator[Array]:
        """Where rows [first, end) of a half are stored."""
        if not self.layout.paired:
            yield target[first:end]
            return
        groups = target.reshape(-1, 2, PAIRED, target.shape[1])[:, half]
        for group in range(first // PAIRED, -(-end // PAIRED)):
            begin = group * PAIRED
            yield groups[group, max(first - begin, 0) : min(end - begin, PAIRED)]

    def parts(self, checkpoint: Checkpoint) -> list[tuple[int, int, int, int, int, int]]:
        """What `copy` does, for the core's FileReader: (file, offset there, offset in the run, bytes, bytes of a piece,
        bytes from one to the next) of each part. Empty where the rows lie in no file as they are read."""
        parts, row = [], 2 * self.columns
        for half, span in enumerate(self.spans):
            first = 0
            for tensor, rows in _parts(self.buffer, self.source, span):
                place, count = checkpoint.place(tensor), rows.stop - rows.start
                if place is None or (self.layout.paired and first % PAIRED):
                    return []
                to, piece, stride = first, count, count
                if self.layout.paired:
                    to, piece, stride = 2 * first + half * PAIRED, PAIRED, 2 * PAIRED
                parts.append((place[0], place[1] + rows.start * row, to * row, count * row, piece * row, stride * row))
                first += count
        return parts

    def refuse(self, checkpoint: Checkpoint) -> None:
        """Raise the error that names a value which is not finite."""
        for tensor, rows in (part for span in self.spans for part in _parts(self.buffer, self.source, span)):
            refuse(checkpoint.read(tensor, rows), rows.start, 0, _named(checkpoint.tensors[tensor]))

    def pack(self, checkpoint: Checkpoint) -> Array:
        """The run's bytes as they are stored."""
        parts = [_assemble(checkpoint, self.buffer, self.source, span.start, span.stop) for span in self.spans]
        quantised = [part for part in parts if isinstance(part, QuantizedArray)]
        plain = [part for part in parts if not isinstance(part, QuantizedArray)]
        part = concatenate(quantised) if quantised else np.concatenate(plain) if len(plain) > 1 else plain[0]
        return self.layout.pack(part, self.buffer.dtype)


def _parts(buffer: Buffer, source: WeightSource, rows: slice) -> list[tuple[str, slice]]:
    """The tensors that rows of a buffer come from, and which of their rows."""
    parts: list[tuple[str, slice]] = []
    first = 0
    for tensor, count in zip(source.tensors, source.rows or (buffer.extents({})[0],), strict=True):
        low, high = max(rows.start, first), min(rows.stop, first + count)
        if low < high:
            parts.append((tensor, slice(low - first, high - first)))
        first += count
    return parts


def rows_at_once(shape: tuple[int, ...], granule: int) -> int:
    """Rows of a buffer that are read, converted and packed together: whole granules."""
    row_bytes = 4 * math.prod(shape[1:])
    return max(granule, RUN_BYTES // row_bytes // granule * granule)


def _assemble(
    checkpoint: Checkpoint, buffer: Buffer, source: WeightSource, begin: int, end: int
) -> Array | QuantizedArray:
    """Rows [begin, end) of a buffer, of its element type or in its block format."""
    if source.values:
        return np.asarray(source.values, np.float64).astype(NUMPY[buffer.dtype]).reshape(buffer.extents({}))[begin:end]
    parts = _parts(buffer, source, slice(begin, end))
    if buffer.dtype in FORMATS:
        return concatenate([_quantised(checkpoint, tensor, taken, buffer.dtype) for tensor, taken in parts])
    result = np.empty((end - begin, *buffer.extents({})[1:]), NUMPY[buffer.dtype])
    row = 0
    for tensor, taken in parts:
        part = checkpoint.read(tensor, taken)
        if (source.add, source.multiply) != (0.0, 1.0):
            part = (part.astype(np.float32) + np.float32(source.add)) * np.float32(source.multiply)
        result[row : row + len(part)] = part  # rounds to nearest even where it narrows
        row += len(part)
    return result


def _quantised(checkpoint: Checkpoint, tensor: str, rows: slice, format: str) -> QuantizedArray:
    """Rows of a tensor in a block format: its own codes, or made from its floats."""
    info = checkpoint.tensors[tensor]
    if info.scheme is not None:
        try:
            array = checkpoint.read_quantized(tensor, rows).to_format(format)
        except BuildError as error:  # values that no sound file has, such as a scale beyond its dtype
            raise CheckpointError(info.file, f"tensor {tensor} has {error.found}, {error.where}") from None
        finite = np.isfinite(array.scales)
        if array.minimums is not None:
            finite &= np.isfinite(array.minimums)
        if not finite.all():
            row = rows.start + int(np.argwhere(~finite)[0, 0])
            raise CheckpointError(info.file, f"tensor {tensor} has a scale that is not finite in row {row}", "numbers")
        return array
    values = checkpoint.read(tensor, rows).astype(np.float32, copy=False)
    try:
        return quantize_rows(values, format, _named(info)).to_format(format)
    except CheckpointError:
        refuse(values, rows.start, 0, _named(info))  # by its row in the tensor, not in this run
        raise


def _named(info: TensorInfo) -> str:
    return f"{info.name} of {info.file}"
