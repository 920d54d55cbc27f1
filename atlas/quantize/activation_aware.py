"""Activation-aware scales for int4 (AWQ: Lin et al., arXiv 2306.00978).

Input channels that carry large activations matter more than others, and a group's scale does not know it. So such a
channel's weights are multiplied by s > 1 before rounding, and what produces the channel is divided by s: the
weights of a norm, or the rows of the matrix before (v before o, up before down). The model computes the same; the
channel's rounding error is divided by s. s = mean |x| ^ alpha, normalised; alpha is searched for each set of matrices
that share an input, by the error of their outputs on calibration inputs; alpha = 0, which changes nothing, is among
the candidates. Which launch produces what is read off the recorded program, so every family is served alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from atlas.models import family_of
from atlas.models.family import WeightSource
from atlas.progress import Progress
from atlas.quantize.calibration import Inputs, matrix_of
from atlas.quantize.layouts import Context, Layout
from atlas.quantize.selection import PLAIN_DTYPES, Selection
from atlas.runtime.program import Launch
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from atlas.weights import Checkpoint
from atlas.weights.quantized import Array
from atlas.weights.safetensors import DTYPES

_ALPHAS = tuple(i / 10 for i in range(11))

_SEARCH_ROWS = 512
"""Rows of each matrix on which alpha is judged, evenly spaced: the error of 512 outputs ranks scales as that of all."""


@dataclasses.dataclass
class Change:
    """What happens to a tensor before it is quantised or kept.

    columns: multiplies each column, [k].  rows: divides each row, [n] (of a vector: each element).
    values: stands in the tensor's place (norm weights).
    """

    columns: Array | None = None
    rows: Array | None = None
    values: Array | None = None

    def apply(self, values: Array) -> Array:
        """float32 in, float32 out."""
        if self.values is not None:
            return self.values
        if self.columns is not None:
            values = values * self.columns
        if self.rows is not None:
            values = values / (self.rows[:, None] if values.ndim == 2 else self.rows)
        return values

    def importance(self, inputs: Inputs) -> Array:
        """Mean square of what will enter the matrix, [k]."""
        return inputs.mean_square if self.columns is None else inputs.mean_square / np.square(self.columns)


@dataclasses.dataclass(frozen=True)
class _Slice:
    """Rows [begin, end) of a tensor."""

    tensor: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class _Set:
    """Matrices that share an input, and how the input can be divided by s.

    matrices: tensors [n, k].  norm: the tensor whose weights are divided, and what is added to them before use.
    rows: the rows that produce the input, in its order.  repeat: input channels of k // repeat.size share one row:
    (heads, repeats, head_dim) of attention, whose query heads share value heads.
    """

    matrices: tuple[str, ...]
    norm: str = ""
    norm_add: float = 0.0
    rows: tuple[_Slice, ...] = ()
    biases: tuple[_Slice, ...] = ()
    heads: tuple[int, int, int] | None = None


def search(
    checkpoint: Checkpoint, inputs: Mapping[str, Inputs], selection: Selection, layout: Layout, progress: Progress
) -> dict[str, Change]:
    """Find the scales of every set. Returns what happens to each tensor that changes."""
    sets = list(_sets(checkpoint, selection))
    changes: dict[str, Change] = {}
    progress.begin("searching scales", len(sets), "set")
    for one in sets:
        scales = _best(checkpoint, one, inputs[one.matrices[0]], layout)
        if scales is not None:
            for tensor in one.matrices:
                changes.setdefault(tensor, Change()).columns = _spread(scales, one.heads)
            if one.norm:
                changes[one.norm] = Change(values=_norm(checkpoint, one) / scales - np.float32(one.norm_add))
            for part in (*one.rows, *one.biases):
                _divide(checkpoint, changes, part, scales, one)
        progress.advance(1)
    return changes


def _best(checkpoint: Checkpoint, one: _Set, inputs: Inputs, layout: Layout) -> Array | None:
    """The scales with the smallest output error, [channels before spreading]; None where changing nothing is best."""
    parts = []
    for tensor in one.matrices:
        values = np.asarray(checkpoint.read(tensor), np.float32)
        parts.append((tensor, values[:: max(1, len(values) // _SEARCH_ROWS)]))
    magnitude = _gather(inputs.mean_abs, one.heads)
    best: tuple[float, Array | None] = (np.inf, None)
    for alpha in _ALPHAS:
        scales = _exact(checkpoint, one, _scales(magnitude, alpha)) if alpha else None
        columns = None if scales is None else _spread(scales, one.heads)
        change = Change(columns)
        importance = change.importance(inputs)
        differences = []
        for tensor, values in parts:
            rounded = layout.quantize(change.apply(values), Context(tensor, importance=importance)).dequantize()
            differences.append((rounded if columns is None else rounded / columns) - values)
        error = float(np.square(inputs.rows @ np.concatenate(differences).T, dtype=np.float64).sum())
        if error < best[0]:
            best = (error, scales)
    return best[1]


def _scales(magnitude: Array, alpha: float) -> Array:
    """mean |x| ^ alpha, brought around 1; a channel that is never used counts as the least used one."""
    used = magnitude[magnitude > 0]
    if not len(used):
        return np.ones_like(magnitude)
    scales = np.maximum(magnitude, used.min()) ** np.float32(alpha)
    return np.asarray(scales / np.sqrt(scales.max() * scales.min()), np.float32)


def _exact(checkpoint: Checkpoint, one: _Set, scales: Array) -> Array:
    """Scales that the norm's stored dtype can divide by without rounding: the model must compute the same."""
    if not one.norm:
        return scales
    weight, info = _norm(checkpoint, one), checkpoint.tensors[one.norm]
    dtype = DTYPES[info.dtype if info.dtype in PLAIN_DTYPES else "BF16"]
    add = np.float32(one.norm_add)
    stored = (weight / scales - add).astype(dtype).astype(np.float32) + add
    usable = (stored != 0) & (weight != 0)
    return np.where(usable, weight / np.where(usable, stored, 1), np.float32(1))


def _norm(checkpoint: Checkpoint, one: _Set) -> Array:
    """What the norm multiplies by, float32 [k]."""
    return np.asarray(checkpoint.read(one.norm), np.float32) + np.float32(one.norm_add)


def _gather(magnitude: Array, heads: tuple[int, int, int] | None) -> Array:
    """Per channel of the producing rows: the mean over the query heads that share it."""
    return magnitude if heads is None else magnitude.reshape(heads).mean(axis=1).reshape(-1)


def _spread(scales: Array, heads: tuple[int, int, int] | None) -> Array:
    """Per input channel [k]."""
    if heads is None:
        return scales
    groups, repeats, dim = heads
    return np.repeat(scales.reshape(groups, 1, dim), repeats, axis=1).reshape(-1)


def _divide(checkpoint: Checkpoint, changes: dict[str, Change], part: _Slice, scales: Array, one: _Set) -> None:
    """Divide a slice's rows by its share of the scales."""
    slices = one.rows if part in one.rows else one.biases
    before = slices[: slices.index(part)]
    begin = sum(other.end - other.begin for other in before)
    change = changes.setdefault(part.tensor, Change())
    if change.rows is None:
        change.rows = np.ones(checkpoint.tensors[part.tensor].shape[0], np.float32)
    change.rows[part.begin : part.end] = scales[begin : begin + part.end - part.begin]


# ---- sets, from the program ----------------------------------------------------------------------


def _sets(checkpoint: Checkpoint, selection: Selection) -> list[_Set]:
    """Every set of matrices whose common input can be scaled."""
    family = family_of(checkpoint.config)
    config = family.configure(checkpoint.config, Shard())
    launches = family.record(config, recipe("f32")).forward.launches
    sources = family.weights(config, checkpoint.tensors)
    producer: dict[str, Launch] = {}
    users: dict[tuple[str, str], list[Launch]] = {}
    origin: dict[tuple[str, str], Launch] = {}
    for launch in launches:
        for buffer in launch.reads():
            if buffer in producer:
                users.setdefault((producer[buffer].name, buffer), []).append(launch)
        for buffer in launch.writes():
            origin[launch.name, buffer] = launch
            producer[buffer] = launch
    result = []
    for (name, buffer), readers in users.items():
        matrices = [matrix_of(reader) for reader in readers]
        tensors = [tensor for m in matrices if m is not None and m in sources for tensor in sources[m].tensors]
        # Something else reads the input, or a matrix that is not quantised: it would see the divided input.
        whole = all(m is not None and m in sources for m in matrices)
        if whole and tensors and all(tensor.removesuffix(".weight") in selection.modules for tensor in tensors):
            one = _foldable(origin[name, buffer], tuple(tensors), launches, sources)
            if one is not None:
                result.append(one)
    return result


def _foldable(
    launch: Launch, matrices: tuple[str, ...], launches: tuple[Launch, ...], sources: Mapping[str, WeightSource]
) -> _Set | None:
    """The set, if what this launch leaves can be divided by changing weights alone."""
    operands, constants = dict(launch.operands), dict(launch.key.constants)
    if launch.key.op == "rms_norm":
        source = sources[operands["weight"]]
        if len(source.tensors) != 1:
            return None
        return _Set(matrices, source.tensors[0], source.add)

    def writer(buffer: str) -> Launch:
        """Who wrote a buffer before this launch ran."""
        return next(other for other in reversed(launches[: launches.index(launch)]) if buffer in other.writes())

    if launch.key.op == "gated_activation":
        inner = int(constants["intermediate"])
        return _from_rows(matrices, writer(operands["gate_up"]), inner, 2 * inner, sources, None)
    if launch.key.op == "paged_attention":
        heads, kv, dim = (int(constants[name]) for name in ("n_heads", "n_kv_heads", "head_dim"))
        rope = writer(operands["v_cache"])
        product = launches[: launches.index(rope)]
        qkv = next(other for other in reversed(product) if dict(rope.operands)["qkv"] in other.writes())
        begin = (heads + kv) * dim
        return _from_rows(matrices, qkv, begin, begin + kv * dim, sources, (kv, heads // kv, dim))
    return None


def _from_rows(
    matrices: tuple[str, ...],
    product: Launch,
    begin: int,
    end: int,
    sources: Mapping[str, WeightSource],
    heads: tuple[int, int, int] | None,
) -> _Set | None:
    """The set whose input is rows [begin, end) of a matrix product's output."""
    operands = dict(product.operands)
    if product.key.op != "linear":
        return None
    n = int(dict(product.key.constants)["n"])
    rows = _slices(sources[operands["weight"]], n, begin, end)
    biases = _slices(sources[operands["bias"]], n, begin, end) if "bias" in operands else ()
    return _Set(matrices, rows=rows, biases=biases, heads=heads)


def _slices(source: WeightSource, n: int, begin: int, end: int) -> tuple[_Slice, ...]:
    """The parts of a buffer's tensors that rows [begin, end) of the buffer come from."""
    result, at = [], 0
    for tensor, count in zip(source.tensors, source.rows or (n,), strict=True):
        low, high = max(begin, at), min(end, at + count)
        if low < high:
            result.append(_Slice(tensor, low - at, high - at))
        at += count
    return tuple(result)
