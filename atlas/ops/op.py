"""What an op contract is. Standard library only; references get NumPy lazily."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from atlas.targets.formats import INTEGER_FORMATS

Mode = Literal["in", "out", "inout"]
Constants = Mapping[str, int | float]
Arrays = Mapping[str, Any]
"""Operand name -> view of its whole buffer, logical layout: a NumPy array, or a BlockArray in a block format. Outputs
are written in place; what is assigned is rounded to the element type or format."""

FLOAT = ("f32", "bf16")
ACTIVATIONS = (*FLOAT, "f8g128")
"""What a matrix product reads; f8g128: E4M3 codes with a scale per row and 128 columns (atlas/targets/formats.py)."""
WEIGHTS = (*ACTIVATIONS, "f8", "nvfp4", "i4g32b", *INTEGER_FORMATS)
"""What a matrix product multiplies with."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """One array of an op.

    shape: expressions over the op's dims and constants, row-major. A buffer may have more rows than
        the run-time dim; rows beyond it are neither read nor written.
    dtypes: accepted element types.
    mode: "in" is read, "out" is written wholly (within the run-time dims), "inout" is both, or is
        written only in part (a cache).
    optional: a launch may leave it out. `arrays` then lacks it, a CPU kernel gets a null pointer in its
        place and a CUDA kernel is compiled with HAS_<NAME> false.
    """

    name: str
    shape: tuple[str | int, ...]
    dtypes: tuple[str, ...]
    mode: Mode = "in"
    optional: bool = False

    @property
    def varies(self) -> bool:
        """Whether kernels of one op may differ in it: it stands in their signatures."""
        return self.optional or len(self.dtypes) > 1


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Elements may differ from the reference by `atol + rtol * |reference|`, by output dtype.

    `atol` is relative to the largest magnitude of the reference's output: an absolute bound alone
    would mean nothing for outputs of another scale. `apart` is absolute, for ids, which have none.
    """

    rtol: float
    atol: float
    apart: float = 0.0

    def allowed(self, expected: Any) -> Any:
        """By how much what is computed may differ from finite reference values."""
        size = abs(expected)
        return self.atol * size.max() + self.rtol * size + self.apart


@dataclasses.dataclass(frozen=True)
class Op:
    """A contract: name, operands, what is computed, and how exactly.

    dims: run-time sizes. A program binds each to a symbol of the step header (see
        atlas/runtime/step.py); kernels read the value from the device, so graphs stay valid.
    constants: sizes and scalars fixed for a model: compile-time constants on a GPU, run-time
        arguments on a CPU. A trailing "eps"-like name is a float.
    reference: computes the outputs in place with NumPy: `reference(arrays, dims, constants)`.
    tolerance: output dtype -> bound on the difference between a kernel and the reference; "x_f8g128.f32" for an output
        in f32 of a launch whose operand x is f8g128 goes before "f32".
    float_constants: those constants that are floats; all others are integers.
    """

    name: str
    operands: tuple[Operand, ...]
    dims: tuple[str, ...]
    constants: tuple[str, ...]
    reference: Callable[[Arrays, Mapping[str, int], Constants], None]
    tolerance: Mapping[str, Tolerance]
    float_constants: tuple[str, ...] = ()

    def operand(self, name: str) -> Operand:
        return self._operands[name]

    @functools.cached_property  # asked for by each operand of each launch
    def _operands(self) -> dict[str, Operand]:
        return {operand.name: operand for operand in self.operands}

    def bound(self, output: str, dtypes: Mapping[str, str]) -> Tolerance:
        """The tolerance of an output of dtype `output` in a launch whose operands have these dtypes."""
        special = (self.tolerance.get(f"{name}_{dtype}.{output}") for name, dtype in dtypes.items())
        return next((tolerance for tolerance in special if tolerance), self.tolerance[output])

    def contract_hash(self) -> str:
        """Changes whenever a kernel written to the old contract would be wrong under the new one."""
        return self._contract_hash

    @functools.cached_property  # asked for by each launch of each program
    def _contract_hash(self) -> str:
        document = {
            "name": self.name,
            "operands": [dataclasses.astuple(operand) for operand in self.operands],
            "dims": self.dims,
            "constants": self.constants,
            "float_constants": self.float_constants,
        }
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def product(x: Any, weight: Any) -> Any:
    """x W^T in fp32, of rows in float32 and a weight operand.

    A block format stands for its dequantised values; of 4 bits, for what multiplies bf16 rows (`BlockArray.factors`):
    the values rounded to bf16, or, where a row has a scale of its own, its exact values without it, and sums scaled.
    """
    if getattr(weight, "format", None) is None or weight.format.bits != 4:
        return x @ weight.astype("float32").T
    matrix, row_scales = weight.factors()
    sums = x @ matrix.T
    return sums if row_scales is None else sums * row_scales


EXACT = Tolerance(0.0, 0.0)
F32 = Tolerance(rtol=2e-5, atol=2e-6)
"""fp32 arithmetic in another summation order."""
BF16 = Tolerance(rtol=1.0 / 128, atol=1e-3)
"""One bf16 rounding step either way (2^-8 relative each) on a value computed in fp32."""
F8_SUMS = Tolerance(rtol=1e-3, atol=2e-3)
"""Tensor cores add products of E4M3 numbers with 13 bits behind the point of the largest: a sum of 128 terms, which is
what a scale allows, is off by 1e-4 to 1e-3 of the largest output (Hopper, measured)."""
F8 = Tolerance(rtol=0.13, atol=1e-5)
"""One step of E4M3 (2^-3 relative; 2^-9 of 448ths of a group's largest) on a value computed in fp32: a sum in another
order may tip a rounding. That an op rounds to nearest is for tests with exact inputs to show (op quantize_rows)."""
