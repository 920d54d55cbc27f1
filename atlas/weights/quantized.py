"""Quantised matrices as NumPy arrays: what checkpoints store, before any kernel's layout.

`QuantizedArray` holds codes and scales of any scheme of docs/checkpoints.md, with groups of any size;
`BlockArray` is a view of a buffer in one of the block formats (atlas/targets/formats.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import ml_dtypes
import numpy as np

from atlas.errors import BuildError
from atlas.targets.formats import FORMATS, GROUP, Format
from atlas.weights.e4m3 import round_rows

Array = np.ndarray[Any, Any]
Code = Literal["i8", "u4", "e4m3", "e2m1"]

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
"""Magnitudes of E2M1 codes 0..7; bit 3 is the sign (OCP Microscaling Formats, v1.0)."""

_E2M1_VALUES = np.concatenate([E2M1, -E2M1])
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_DEQUANTIZED_ROWS = 32
"""Rows dequantised together: their float32 values (512 KB at 4,096 columns) stay in the cache between operations."""

_NUMPY: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a stored matrix is quantised: what is known of it before its values are read.

    code: of the elements, as in `QuantizedArray`.
    group: rows and columns that share a scale; 0 stands for all: (1, 0) per row, (0, 0) per tensor.
    scale: dtype of the stored scales: "f16", "bf16", "f32", "e4m3", "e8m0".
    zero: every group has a zero point of its own.
    bias: what is taken from every code where it has not (8 for symmetric 4-bit codes).
    minimum: every group has a minimum: value = code * scale + minimum.
    act_order: columns of a group do not lie together (GPTQ).
    global_scale: one more scale for the whole tensor (NVFP4).
    """

    code: Code
    group: tuple[int, int]
    scale: str
    zero: bool = False
    bias: int = 0
    minimum: bool = False
    act_order: bool = False
    global_scale: bool = False

    def block_format(self) -> str | None:
        """The smallest block format sure to hold such a tensor exactly; None where only dequantising keeps it.

        A zero point or bias under a float32 scale becomes a minimum, and a global scale that the file divides by
        becomes a float32 factor: each rounds a value once more (2^-24).
        """
        if self.code == "e4m3":
            if self.group[0] <= 1 and not self.group[1]:  # per tensor or row
                return "f8"
            return None if self.group[1] % FORMATS["f8g128"].group else "f8g128"
        if self.code == "e2m1":
            fits = self.group == (1, FORMATS["nvfp4"].group) and self.scale == "e4m3" and self.global_scale
            return "nvfp4" if fits else None
        if self.act_order or self.global_scale or self.scale not in ("f16", "bf16", "f32") or self.group[1] % GROUP:
            return None
        f16 = self.scale == "f16"
        if self.code == "i8":
            return None if self.zero or self.bias or self.minimum else "i8g32" if f16 else "i8g32f"
        if self.code != "u4":
            return None
        symmetric = self.bias == FORMATS["i4g32"].bias and not self.zero and not self.minimum
        if not f16:
            return "i4g32b" if symmetric and self.scale == "bf16" else "i4g32f"
        if self.minimum:
            return "i4g32m"
        return "i4g32" if symmetric else "i4g32z"


@dataclasses.dataclass
class QuantizedArray:
    """A matrix [n, k] of codes with scales; every field exactly as the checkpoint has it.

    code: "i8" (int8), "u4" (0..15 in a uint8), "e4m3" (float8_e4m3fn), "e2m1" (0..15 in a uint8).
    codes: [n, k], one code per element.
    scales: float32 [ceil(n / group[0]), ceil(k / group[1])]: whatever dtype the file has converts exactly.
    group: rows and columns that share a scale; (1, k) is per row, (n, k) per tensor, (128, 128) FP8 blocks.
    zeros: int16, like scales, or None: value = (code - zero) * scale.
    minimums: float32, like scales, or None: value = code * scale + minimum.
    group_index: int32 [k], the group of each column where groups are not contiguous (GPTQ act-order), or None.
    global_scale: multiplies every scale (NVFP4).
    row_scales: float32 [n], multiply every scale of their row (`to_format("nvfp4")`), or None.
    """

    code: Code
    codes: Array
    scales: Array
    group: tuple[int, int]
    zeros: Array | None = None
    minimums: Array | None = None
    group_index: Array | None = None
    global_scale: float = 1.0
    row_scales: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    def rows(self, begin: int, end: int) -> QuantizedArray:
        """Rows [begin, end). A group that reaches beyond them is repeated for each of its rows."""
        take: Any = slice(begin, end) if self.group[0] == 1 else np.arange(begin, end) // self.group[0]

        def part(array: Array | None) -> Array | None:
            return None if array is None else array[take]

        return dataclasses.replace(
            self,
            codes=self.codes[begin:end],
            scales=self.scales[take],
            zeros=part(self.zeros),
            minimums=part(self.minimums),
            group=(1, self.group[1]),
            row_scales=None if self.row_scales is None else self.row_scales[begin:end],
        )

    def dequantize(self) -> Array:
        """float32 [n, k]: the values, each rounded at most once per operation of its definition."""
        n, k = self.shape
        values = np.empty((n, k), np.float32)
        for begin in range(0, n, _DEQUANTIZED_ROWS):
            end = min(begin + _DEQUANTIZED_ROWS, n)
            self.rows(begin, end)._dequantize_into(values[begin:end])
        return values

    def _dequantize_into(self, values: Array) -> None:
        """`dequantize` for groups within one row."""
        table = {"e2m1": _E2M1_VALUES, "e4m3": _E4M3_VALUES}.get(self.code)
        if table is None:
            values[:] = self.codes
        else:
            np.take(table, self.codes.view(np.uint8), out=values, mode="clip")
        scales = self.scales.astype(np.float32)
        if self.global_scale != 1.0:
            # In float64, so that a stored divisor's reciprocal gives the quotient rounded once.
            scales = (scales.astype(np.float64) * self.global_scale).astype(np.float32)
        if self.row_scales is not None:
            scales = scales * self.row_scales[:, None]
        zeros = None if self.zeros is None else self.zeros.astype(np.float32)
        for operation, array in ((np.subtract, zeros), (np.multiply, scales), (np.add, self.minimums)):
            if array is None:
                continue
            if self.group_index is not None:
                operation(values, array.take(self.group_index, axis=1), out=values)
                continue
            # Whole groups side by side, then the last one, which may have fewer columns.
            n, k = values.shape
            whole = k // self.group[1]
            inside, rest = values[:, : whole * self.group[1]], values[:, whole * self.group[1] :]
            groups = inside.reshape(n, whole, self.group[1]) if whole else inside[:, :, None]
            operation(groups, array[:, :whole, None], out=groups)
            operation(rest, array[:, whole:], out=rest)

    def to_format(self, name: str) -> QuantizedArray:
        """The same values with the codes, groups and scales of a block format.

        Returns the format's groups of one row, scales that its dtype holds, an integer format's bias as zero points,
        and codes padded to whole groups (`codes` then has more columns than the matrix; padding has the value 0 or is
        multiplied by nothing).

        Raises:
            BuildError: the format does not hold these values exactly (see `formats.EXACT_IN`).
        """
        format = FORMATS[name]
        codes = {"integer": ("i8", "u4"), "e4m3": ("e4m3",), "e2m1": ("e2m1",)}[format.element]
        odd = self.group_index is not None or (not format.row_scale and self.global_scale != 1.0)
        if self.code not in codes or odd:
            raise BuildError(
                f"format {name}", f"codes {self.code} with groups {self.group}", f"codes {', '.join(codes)} in groups"
            )
        if self.group[1] < self.shape[1] and (not format.group or self.group[1] % format.group):
            accepted = f"a multiple of {format.group}" if format.group else "one group for all columns"
            raise BuildError(f"format {name}", f"groups of {self.group[1]} columns", accepted)
        if format.element == "integer":
            return self._to_integer_format(format)
        codes8, scales = self._padded(format), self._regroup(self.scales, format).astype(np.float32)
        if not format.row_scale:
            return QuantizedArray(self.code, codes8, scales, (1, format.group or codes8.shape[1]))
        # A scale's sign moves into its codes, and codes that nothing multiplies become zeros: a kernel then meets
        # positive scales only, and need not tell a zero from the smallest of them.
        signs = np.where(np.signbit(scales), np.uint8(8), np.uint8(0))
        codes8 = codes8 ^ np.repeat(signs, format.group, axis=1)
        codes8[np.repeat(scales == 0, format.group, axis=1)] = 0
        scales = np.abs(scales)
        _hold(name, "scales", bool((scales.astype(_NUMPY[format.scale]).astype(np.float32) == scales).all()))
        rows = np.full(len(codes8), self.global_scale, np.float32) if self.row_scales is None else self.row_scales
        return QuantizedArray(self.code, codes8, scales, (1, format.group), row_scales=rows)

    def _regroup(self, array: Array, format: Format) -> Array:
        """Values per group as values per group of the format, of single rows."""
        n, k = self.shape
        array = np.repeat(array, self.group[0], axis=0)[:n] if self.group[0] > 1 else array
        times = -(-self.group[1] // format.group) if format.group else 1
        return array if times == 1 else np.repeat(array, times, axis=1)[:, : format.groups(k)]

    def _padded(self, format: Format) -> Array:
        """The codes, zeros added to the last group."""
        n, k = self.shape
        if format.columns(k) == k:
            return self.codes
        codes = np.zeros((n, format.columns(k)), self.codes.dtype)
        codes[:, :k] = self.codes
        return codes

    def _to_integer_format(self, format: Format) -> QuantizedArray:
        """`to_format` for integer codes in groups that fit."""
        name, k = format.name, self.shape[1]
        codes = self._padded(format)
        scales = self._regroup(self.scales, format).astype(np.float32)
        zeros = None if self.zeros is None else self._regroup(self.zeros, format)
        minimums = None if self.minimums is None else self._regroup(self.minimums, format)
        if format.minimum:
            if minimums is None:
                minimums = np.zeros_like(scales) if zeros is None else -(zeros.astype(np.float32) * scales)
            zeros = None
        elif minimums is not None:
            raise BuildError(f"format {name}", "values with a minimum", "a format that stores one")
        elif format.zero:
            zeros = np.zeros(scales.shape, np.int16) if zeros is None else zeros
        else:
            shift = np.int16(format.bias) - (0 if zeros is None else zeros.astype(np.int16))
            if np.any(shift):
                codes = codes + np.repeat(np.broadcast_to(shift, scales.shape), GROUP, axis=1)
            zeros = np.full(scales.shape, format.bias, np.int16) if format.bias else None
            if k % GROUP:
                codes[:, k:] = format.bias
        low, high = (-128, 127) if format.signed else (0, 15)
        _hold(name, "codes", bool(codes.size == 0 or (codes.min() >= low and codes.max() <= high)))
        if format.zero and zeros is not None:
            _hold(name, "zero points", bool(zeros.size == 0 or (zeros.min() >= 0 and zeros.max() <= 255)))
        for what, array, dtype in (("scales", scales, format.scale), ("minimums", minimums, format.minimum)):
            if array is not None and dtype in ("f16", "bf16"):
                with np.errstate(over="ignore"):
                    same = (array.astype(_NUMPY[dtype]) == array) | np.isnan(array)  # every dtype holds a NaN
                _hold(name, what, bool(same.all()))
        return QuantizedArray(
            "i8" if format.signed else "u4",
            codes.astype(np.int8 if format.signed else np.uint8, copy=False),
            scales,
            (1, GROUP),
            zeros,
            minimums,
        )


def concatenate(parts: list[QuantizedArray]) -> QuantizedArray:
    """Rows of several arrays of one format, as `to_format` returns them."""
    if len(parts) == 1:
        return parts[0]

    def join(field: str) -> Array | None:
        arrays = [getattr(part, field) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    codes, scales = join("codes"), join("scales")
    assert codes is not None and scales is not None
    return dataclasses.replace(
        parts[0],
        codes=codes,
        scales=scales,
        zeros=join("zeros"),
        minimums=join("minimums"),
        row_scales=join("row_scales"),
    )


def _hold(name: str, what: str, holds: bool) -> None:
    if not holds:
        raise BuildError(f"format {name}", f"{what} that it cannot hold exactly", "another format for this tensor")


def to_rows(array: QuantizedArray, name: str) -> Array:
    """The row-major stored form of `array.to_format(name)`: uint8 [n, row_bytes]."""
    format, blocks = FORMATS[name], array.to_format(name)
    codes = blocks.codes[:, 0::2] | blocks.codes[:, 1::2] << 4 if format.bits == 4 else blocks.codes.view(np.uint8)
    parts = [codes, _bytes(blocks.scales, format.scale)]
    if format.zero and blocks.zeros is not None:
        parts.append(blocks.zeros.astype(np.uint8))
    if blocks.minimums is not None:
        parts.append(_bytes(blocks.minimums, format.minimum))
    if blocks.row_scales is not None:
        parts.append(_bytes(blocks.row_scales[:, None], "f32"))
    return np.concatenate(parts, axis=1)


def _bytes(values: Array, dtype: str) -> Array:
    return np.ascontiguousarray(values, _NUMPY[dtype]).view(np.uint8)


class BlockArray:
    """A matrix [n, k] in a block format, over the bytes of a row-major buffer [n, row_bytes].

    Stands where an op's reference expects an array: `astype` dequantises, indexing selects rows, and assignment
    rounds rows to f8 or f8g128.
    """

    def __init__(self, raw: Array, format: Format, k: int) -> None:
        self.raw, self.format, self.k = raw.view(np.uint8).reshape(-1, format.row_bytes(k)), format, k

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.raw), self.k

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Any) -> BlockArray:
        """Rows by slice or index array."""
        return BlockArray(self.raw[rows], self.format, self.k)

    def __setitem__(self, rows: Any, values: Array) -> None:
        """Write rows of float32 values, rounded (atlas/weights/e4m3.py)."""
        if self.format.element != "e4m3":
            raise BuildError(f"format {self.format.name}", "a kernel's output in it", "f8, f8g128 or floats")
        codes, scales = round_rows(np.asarray(values, np.float32), self.format)
        self.raw[rows] = np.concatenate([codes.view(np.uint8), _bytes(scales, "f32")], axis=1)

    def copy(self) -> BlockArray:
        return BlockArray(self.raw.copy(), self.format, self.k)

    def quantized(self) -> QuantizedArray:
        """Codes [n, k], scales and offsets [n, groups]."""
        format, groups = self.format, self.format.groups(self.k)
        code_bytes = format.columns(self.k) * format.bits // 8
        codes = self.raw[:, :code_bytes]
        if format.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(self.raw), 2 * code_bytes)
        elif format.element == "integer":
            codes = codes.view(np.int8)
        else:
            codes = codes.view(_NUMPY[format.element])
        position = code_bytes

        def take(dtype: np.dtype[Any], count: int = groups) -> Array:
            nonlocal position
            begin, position = position, position + count * dtype.itemsize
            return np.ascontiguousarray(self.raw[:, begin:position]).view(dtype)

        scales = take(_NUMPY[format.scale]).astype(np.float32)
        zeros = take(np.dtype(np.uint8)).astype(np.int16) if format.zero else None
        if format.bias:
            zeros = np.full(scales.shape, format.bias, np.int16)
        minimums = take(_NUMPY[format.minimum]).astype(np.float32) if format.minimum else None
        row_scales = take(_NUMPY["f32"], 1)[:, 0] if format.row_scale else None
        return QuantizedArray(
            code_of(format),
            codes[:, : self.k],
            scales,
            (1, format.group or self.k),
            zeros,
            minimums,
            row_scales=row_scales,
        )

    def factors(self) -> tuple[Array, Array | None]:
        """What a product with bf16 rows multiplies: a float32 matrix of bf16 numbers, and float32 factors by row.

        x W^T is (x matrix^T) * factors. Of nvfp4 the matrix is code * scale, which bf16 holds exactly, and the
        factors are the row scales; other formats have values rounded to bf16 once, and no factors.
        """
        array = self.quantized()
        row_scales, array.row_scales = array.row_scales, None
        return array.dequantize().astype(ml_dtypes.bfloat16).astype(np.float32), row_scales

    def astype(self, dtype: Any, copy: bool = False) -> Array:
        return self.quantized().dequantize().astype(dtype, copy=copy)


def code_of(format: Format) -> Code:
    """The codes of a format as `QuantizedArray` names them."""
    if format.element == "integer":
        return "i8" if format.signed else "u4"
    return format.element
