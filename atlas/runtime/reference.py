"""The `reference` backend: executes any program with the ops' NumPy references.

It needs neither kernels nor the extension, so it is the mock for tests of everything above the
backend seam and the oracle for every other backend. Slow by design: it never takes a short cut that
the contract does not state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.errors import DeviceError
from atlas.ops.op import Arrays
from atlas.runtime.backend import Array, Backend, BoundProgram
from atlas.runtime.step import HEADER_WORDS, PHASE_PREFILL, PHASE_WORD, STEP_VERSION, SYMBOLS
from atlas.targets import formats
from atlas.weights.layouts import LAYOUTS
from atlas.weights.quantized import BlockArray


class ReferenceBackend(Backend):
    """NumPy over one arena of bytes, all buffers row-major."""

    name = "reference"

    def __init__(self) -> None:
        self._arena = np.zeros(0, np.uint8)
        self._programs: list[tuple[BoundProgram, dict[str, Array | BlockArray]]] = []
        self._symbols: dict[str, int] = {}
        self._phase = PHASE_PREFILL

    def describe(self) -> str:
        return f"reference (NumPy {np.__version__})"

    def allocate(self, nbytes: int) -> None:
        self._arena = np.zeros(nbytes, np.uint8)

    def _bytes(self, offset: int, nbytes: int) -> Array:
        if not 0 <= offset <= offset + nbytes <= len(self._arena):
            raise DeviceError(
                "reference", f"access [{offset}, +{nbytes}) outside the arena of {len(self._arena)} bytes"
            )
        return self._arena[offset : offset + nbytes]

    def write(self, offset: int, data: Array) -> None:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._bytes(offset, flat.nbytes)[:] = flat

    def read(self, offset: int, data: Array) -> None:
        flat = data.reshape(-1).view(np.uint8)
        flat[:] = self._bytes(offset, flat.nbytes)

    def fill(self, offset: int, value: int, nbytes: int) -> None:
        self._bytes(offset, nbytes)[:] = value

    def staging(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def load(self, program: BoundProgram) -> int:
        views: dict[str, Array | BlockArray] = {}
        for launch in program.program.launches:
            for _, name in launch.operands:
                buffer = program.buffers[name]
                shape = buffer.extents(program.limits.symbols())
                raw = self._bytes(program.plan.offsets[name], formats.nbytes(buffer.dtype, shape))
                views[name] = LAYOUTS["row_major"].unpack(raw, shape, buffer.dtype)
        self._programs.append((program, views))
        return len(self._programs) - 1

    def begin_step(self, offset: int, block: memoryview, nbytes: int) -> None:
        header = np.frombuffer(block, np.int32, HEADER_WORDS)
        if header[0] != STEP_VERSION:
            raise DeviceError("step block", f"version {header[0]}", str(STEP_VERSION))
        self._bytes(offset, nbytes)[:] = np.frombuffer(block, np.uint8, nbytes)
        self._symbols = {name: int(header[1 + i]) for i, name in enumerate(SYMBOLS)}
        self._phase = int(header[PHASE_WORD])

    def run(self, handle: int, begin: int, end: int) -> None:
        program, views = self._programs[handle]
        for launch in program.program.launches[begin:end]:
            if not launch.is_made(self._phase):
                continue
            dims = {dim: self._symbols[symbol] for dim, symbol in launch.dims}
            arrays: Arrays = {operand: views[name] for operand, name in launch.operands}
            constants: dict[str, Any] = dict(launch.key.constants)
            launch.op.reference(arrays, dims, constants)

    def synchronize(self) -> None:
        """Every run is complete on return."""
