"""Programs: recorded lists of launches over named buffers with symbolic dims.

A model family records a program once, from shape and recipe alone; nothing here touches a device or
NumPy. The build takes a program's launches as the closure of a target ("which kernels are needed"),
the loader binds its buffers to the arena, the core replays it, and the reference backend executes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from atlas.build.kernel_file import PHASES
from atlas.errors import BuildError
from atlas.ops import OPS
from atlas.ops.op import Op
from atlas.runtime.step import FIELDS, SYMBOLS
from atlas.targets import formats
from atlas.targets.expression import evaluate, names_in

BufferKind = Literal["weight", "state", "workspace", "step", "result", "delivery"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A named array.

    shape: expressions over step symbols and integers.
    kind: weight (written at load), state (persists between steps), workspace (reused when dead),
        step (a field of the step block), result (read by the host after the step), delivery (written by the host
        between forward and sample).
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    kind: BufferKind

    def extents(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(evaluate(extent, symbols, self.name) for extent in self.shape)


@dataclasses.dataclass(frozen=True)
class KernelKey:
    """What a kernel is specialised for: an op, the element types of the operands it gets, its constants.

    On hardware whose kernels take run-time constants (`cpu`) only op and dtypes select the kernel.
    """

    op: str
    dtypes: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | float], ...]

    def signature(self) -> str:
        """op and the dtypes of operands that may vary, e.g. `linear.x_bf16.weight_bf16.out_f32`; an optional
        operand stands in it only where it is given: `linear.x_bf16.weight_bf16.bias_f32.out_f32`."""
        varying = {operand.name for operand in OPS[self.op].operands if operand.varies}
        return ".".join([self.op, *(f"{name}_{dtype}" for name, dtype in self.dtypes if name in varying)])

    def name(self) -> str:
        """A readable, unique C identifier."""
        return _name(self)


@functools.cache  # hundreds of launches, each asked several times, have a few dozen names
def _name(key: KernelKey) -> str:
    constants = [f"{k}{v!r}" for k, v in key.constants]
    text = "__".join([key.signature().replace(".", "_"), *constants])
    return "".join(c if c.isalnum() or c == "_" else "_" for c in text)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch. `operands`: operand -> buffer name, in the contract's order, without optional
    operands that it leaves out. `phase`: of the steps that make it, "prefill" or "decode"; "" for all."""

    name: str
    key: KernelKey
    operands: tuple[tuple[str, str], ...]
    dims: tuple[tuple[str, str], ...]
    phase: str = ""

    @property
    def op(self) -> Op:
        return OPS[self.key.op]

    @property
    def over_logits(self) -> bool:
        """Whether its rows are those whose logits are wanted, of which a prompt's step has as few as a decoding one."""
        return "n_logits" in dict(self.dims).values()

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases whose kernels it runs. What is over logits runs decode kernels in every step."""
        if self.over_logits:
            return ("decode",)
        return (self.phase,) if self.phase else PHASES

    def is_made(self, phase: int) -> bool:
        """Whether steps of a phase, PHASE_PREFILL or PHASE_DECODE, make it."""
        return self.phase in ("", PHASES[phase])

    def reads(self) -> list[str]:
        return [buffer for name, buffer in self.operands if self.op.operand(name).mode != "out"]

    def writes(self) -> list[str]:
        return [buffer for name, buffer in self.operands if self.op.operand(name).mode != "in"]


@dataclasses.dataclass(frozen=True)
class Program:
    """Launches in order. They share one table of buffers with the other programs of a step."""

    name: str
    launches: tuple[Launch, ...]


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """A step's two programs. Between them the host may write "delivery" buffers (a grammar mask)."""

    buffers: Mapping[str, Buffer]
    forward: Program
    sample: Program

    def launches(self) -> tuple[Launch, ...]:
        return self.forward.launches + self.sample.launches

    def closure(self) -> dict[KernelKey, tuple[str, ...]]:
        """Every distinct kernel the programs need, in first-use order, and the phases that need it."""
        found: dict[KernelKey, tuple[str, ...]] = {}
        for launch in self.launches():
            found[launch.key] = tuple(sorted({*found.get(launch.key, ()), *launch.phases}, reverse=True))
        return found

    def weight_bytes(self) -> int:
        """Bytes of all weights, row-major: what any layout takes at least."""
        weights = [buffer for buffer in self.buffers.values() if buffer.kind == "weight"]
        return sum(formats.nbytes(buffer.dtype, buffer.extents({})) for buffer in weights)

    def describe(self) -> str:
        """The programs as text, one launch a line."""
        lines = []
        for program in (self.forward, self.sample):
            lines.append(f"{program.name}:")
            for launch in program.launches:
                operands = ", ".join(f"{operand}={buffer}" for operand, buffer in launch.operands)
                only = f", in {launch.phase} steps" if launch.phase else ""
                lines.append(f"  {launch.name}: {launch.key.signature()}({operands}){only}")
        return "\n".join(lines)


class Recorder:
    """Records programs. Every launch is checked against its op's contract as it is recorded."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self._programs: dict[str, list[Launch]] = {}
        self._current: list[Launch] = []
        for field in FIELDS:
            self.buffer(f"step.{field.name}", field.dtype, field.shape, "step")

    def buffer(self, name: str, dtype: str, shape: tuple[str | int, ...], kind: BufferKind) -> str:
        """Declare a buffer; declaring it again must agree. Returns the name."""
        new = Buffer(name, dtype, shape, kind)
        known = self.buffers.setdefault(name, new)
        if known != new:
            raise BuildError(f"buffer {name}", f"declared as {new}, earlier as {known}")
        return name

    def begin(self, program: str) -> None:
        """Launches recorded from here on belong to `program`."""
        self._current = self._programs.setdefault(program, [])

    def launch(
        self,
        op: str,
        name: str,
        operands: Mapping[str, str],
        dims: Mapping[str, str],
        constants: Mapping[str, int | float],
        phase: str = "",
    ) -> None:
        """Record one launch of `op`. Optional operands may be left out. phase: as a Launch has it.

        Raises:
            BuildError: an operand, dim or constant is missing, unknown, or of another shape or dtype
                than the contract says.
        """
        self.add(self.checked(op, name, operands, dims, constants, phase))

    def add(self, launch: Launch) -> None:
        """Record a launch that was checked with the same buffers."""
        self._current.append(launch)

    def checked(
        self,
        op: str,
        name: str,
        operands: Mapping[str, str],
        dims: Mapping[str, str],
        constants: Mapping[str, int | float],
        phase: str = "",
    ) -> Launch:
        """What `launch` would record. Raises as it does."""
        where = f"launch {name} of op {op}"
        if op not in OPS:
            raise BuildError(where, "there is no such op", ", ".join(OPS))
        if phase not in ("", *PHASES):
            raise BuildError(where, f"phase {phase!r}", f"{', '.join(PHASES)}, or '' for every step")
        contract = OPS[op]
        present = [operand for operand in contract.operands if operand.name in operands or not operand.optional]
        for what, given, expected in (
            ("operands", operands, [operand.name for operand in present]),
            ("dims", dims, contract.dims),
            ("constants", constants, contract.constants),
        ):
            if set(given) != set(expected):
                left_out = sorted({operand.name for operand in contract.operands} - set(expected) - set(given))
                optional = f", and optionally {left_out}" if what == "operands" and left_out else ""
                raise BuildError(where, f"{what} {sorted(given)}", f"exactly {sorted(expected)}{optional}")
        for dim, symbol in dims.items():
            if symbol not in SYMBOLS:
                raise BuildError(where, f"dim {dim} is bound to {symbol!r}", ", ".join(SYMBOLS))
        dtypes = []
        for operand in present:
            buffer = self.buffers.get(operands[operand.name])
            if buffer is None:
                raise BuildError(where, f"operand {operand.name}: no buffer {operands[operand.name]!r}")
            if buffer.dtype not in operand.dtypes:
                raise BuildError(
                    where, f"operand {operand.name} is {buffer.dtype} ({buffer.name})", ", ".join(operand.dtypes)
                )
            self._check_shape(where, buffer, operand.shape, dims, constants)
            dtypes.append((operand.name, buffer.dtype))
        key = KernelKey(op, tuple(dtypes), tuple((c, constants[c]) for c in contract.constants))
        return Launch(
            name,
            key,
            tuple((operand.name, operands[operand.name]) for operand in present),
            tuple((dim, dims[dim]) for dim in contract.dims),
            phase,
        )

    def _check_shape(
        self,
        where: str,
        buffer: Buffer,
        shape: tuple[str | int, ...],
        dims: Mapping[str, str],
        constants: Mapping[str, int | float],
    ) -> None:
        integers = {name: value for name, value in constants.items() if isinstance(value, int)}
        expected = [
            dims[extent] if isinstance(extent, str) and extent in dims else _constant(extent, integers, where)
            for extent in shape
        ]
        found = [_constant(extent, {}, where) if not names_in(extent) else extent for extent in buffer.shape]
        if found != expected:
            raise BuildError(where, f"buffer {buffer.name} has shape {found}", str(expected))

    def finish(self) -> StepPrograms:
        """The recorded programs "forward" and "sample", with the workspace that they use."""
        programs = {name: Program(name, tuple(launches)) for name, launches in self._programs.items()}
        used = {buffer for launches in self._programs.values() for launch in launches for _, buffer in launch.operands}
        buffers = {name: buffer for name, buffer in self.buffers.items() if buffer.kind != "workspace" or name in used}
        return StepPrograms(buffers, programs["forward"], programs["sample"])


def _constant(extent: str | int, integers: Mapping[str, int], where: str) -> int:
    return evaluate(extent, integers, where)
