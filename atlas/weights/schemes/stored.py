"""The pieces of one quantised weight as a file stores them, and what a scheme makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from atlas.errors import CheckpointError
from atlas.weights.checkpoint import TensorInfo
from atlas.weights.quantized import QuantizedArray, Scheme

Array = npt.NDArray[Any]
Load = Callable[[str], Array]
"""Stored name -> the whole stored tensor, as a view of the file."""

SCALE_DTYPES = {"F16": "f16", "BF16": "bf16", "F32": "f32", "F8_E4M3": "e4m3", "F8_E8M0": "e8m0"}
FLOAT_SCALES = ("F16", "BF16", "F32")


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """One weight of a checkpoint: its logical shape [n, k], its scheme, and how rows of it are read.

    codes: the stored tensor that holds the codes.
    read: (load, first row, end) -> those rows.
    """

    codes: TensorInfo
    shape: tuple[int, int]
    scheme: Scheme
    read: Callable[[Load, int, int], QuantizedArray]


class Module:
    """The stored tensors of one module, `name` + "." + piece, checked as they are taken."""

    def __init__(self, name: str, pieces: Mapping[str, TensorInfo], folder: str, load: Load) -> None:
        self.name, self.pieces, self.folder, self.load = name, pieces, folder, load

    def __contains__(self, piece: str) -> bool:
        return piece in self.pieces

    def values(self, piece: str) -> Array:
        """A stored tensor's values: for small ones that decide how the others are read."""
        return self.load(f"{self.name}.{piece}")

    def fail(self, piece: str, found: str, accepted: str = "", fix: str = "") -> CheckpointError:
        """The error that names this tensor, or the one that is missing."""
        file = self.pieces[piece].file if piece in self.pieces else next(iter(self.pieces.values())).file
        return CheckpointError(f"{self.folder}/{file}", f"tensor {self.name}.{piece} {found}", accepted, fix)

    def take(self, piece: str, dtypes: Collection[str], *shapes: Sequence[int | None], why: str = "") -> TensorInfo:
        """A piece that must be there, of one of these dtypes and shapes (None: any size of at least 1).

        Raises:
            CheckpointError: naming the tensor, what it is, and what is accepted.
        """
        if piece not in self.pieces:
            raise self.fail(piece, "is missing", why or "every piece that its scheme stores")
        info = self.pieces[piece]
        if info.dtype not in dtypes:
            raise self.fail(piece, f"has type {info.dtype}", ", ".join(dtypes))
        if shapes and not any(_fits(info.shape, shape) for shape in shapes):
            accepted = " or ".join(str([size if size is not None else "any" for size in shape]) for shape in shapes)
            raise self.fail(piece, f"has shape {list(info.shape)}", accepted + (f", {why}" if why else ""))
        return info

    def group_index(self, piece: str, k: int, groups: int, size: int) -> Array | None:
        """Checked int32 [k] of a stored group index; None where it only counts groups of `size` up, or is absent.

        Raises:
            CheckpointError: an index that names no group.
        """
        if piece not in self.pieces:
            return None
        self.take(piece, ("I32", "I64"), [k])
        index = self.values(piece)
        if int(index.min()) < 0 or int(index.max()) >= groups:
            bad = index[(index < 0) | (index >= groups)][0]
            raise self.fail(piece, f"names group {int(bad)}", f"groups 0 to {groups - 1}")
        if (index == np.arange(k) // size).all():
            return None
        return np.ascontiguousarray(index, np.int32)


def _fits(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(
        size == want if want is not None else size > 0 for size, want in zip(found, wanted, strict=True)
    )


def unpack_words(words: Array, bits: int) -> Array:
    """int32 [.., w] -> uint8 [.., w * 32 / bits] codes, the first in the lowest bits. bits: 2, 4 or 8."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    mask = np.uint8((1 << bits) - 1)
    parts = [octets >> np.uint8(shift) & mask for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*octets.shape[:-1], octets.shape[-1] * len(parts))


def integer_array(
    bits: int, codes: Array, scales: Array, group: tuple[int, int], zeros: Array, group_index: Array | None = None
) -> QuantizedArray:
    """Unsigned codes with zero points, as `QuantizedArray` has them: 8-bit codes signed, with zero points to match.

    zeros: integer, like scales. Zero points of signed codes that are all 0 are left out.
    """
    zeros = zeros.astype(np.int16)
    if bits == 8:
        codes, zeros = (codes ^ np.uint8(128)).view(np.int8), zeros - np.int16(128)
    kept = zeros if bits < 8 or zeros.any() else None
    return QuantizedArray("i8" if bits == 8 else "u4", codes, scales.astype(np.float32), group, kept, None, group_index)


def integer_scheme(bits: int, scale: TensorInfo, group: tuple[int, int], zero: bool, act_order: bool = False) -> Scheme:
    """The `Scheme` of what `integer_array` makes; without `zero`, the zero points are the codes' middle."""
    bias = 0 if zero or bits == 8 else 1 << (bits - 1)
    code = "i8" if bits == 8 else "u4"
    return Scheme(code, group, SCALE_DTYPES[scale.dtype], zero=zero, bias=bias, act_order=act_order)  # type: ignore[arg-type]
