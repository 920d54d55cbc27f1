"""The backend seam: a device that can hold an arena and run programs.

Three implementations: `cpu` and `cuda` in the C++ core (atlas/runtime/core.py) and `reference` in NumPy
(atlas/runtime/reference.py), which executes any program without kernels and is the oracle of the others.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from atlas.build.manifest import KernelEntry
from atlas.errors import BuildError
from atlas.runtime import step
from atlas.runtime.memory_plan import MemoryPlan
from atlas.runtime.program import Buffer, Launch, Program

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class BoundProgram:
    """A program whose buffers have places and whose launches have kernels.

    kernels: KernelKey.name() or signature -> entry; empty for backends that need none.
    """

    program: Program
    buffers: Mapping[str, Buffer]
    plan: MemoryPlan
    limits: step.Limits
    kernels: Mapping[str, KernelEntry]

    def entry(self, launch: Launch) -> KernelEntry:
        """The kernel of a launch. Raises BuildError when the set has none: never a silent fallback."""
        for name in (launch.key.name(), launch.key.signature()):
            if name in self.kernels:
                return self.kernels[name]
        raise BuildError(f"launch {launch.name}", f"the kernel set has no kernel {launch.key.name()}")


class Backend(ABC):
    """A device. One thread at a time may call it. `run` may return before the work is done."""

    name: str

    @abstractmethod
    def describe(self) -> str:
        """One line for logs."""

    @abstractmethod
    def allocate(self, nbytes: int) -> None:
        """The one device allocation; called once. Raises DeviceError when it does not fit."""

    @abstractmethod
    def write(self, offset: int, data: Array) -> None:
        """Copy a C-contiguous array into the arena at a byte offset."""

    @abstractmethod
    def read(self, offset: int, data: Array) -> None:
        """Copy from the arena into a C-contiguous array; waits for work in flight."""

    @abstractmethod
    def fill(self, offset: int, value: int, nbytes: int) -> None:
        """Set bytes."""

    @abstractmethod
    def staging(self, nbytes: int) -> memoryview:
        """Writable host memory that copies to the device fastest."""

    def release(self, staging: memoryview) -> None:
        """Give `staging` memory back. No copy in flight and nobody's view may use it any more."""
        staging.release()

    @abstractmethod
    def load(self, program: BoundProgram) -> int:
        """Resolve every kernel of a program; returns its handle."""

    @abstractmethod
    def begin_step(self, offset: int, block: memoryview, nbytes: int) -> None:
        """Copy the step block to the arena; its header supplies the dims and the phase of the runs that follow.

        A block in `staging` memory must stay as it is until a fence that was set afterwards is passed.
        """

    @abstractmethod
    def run(self, handle: int, begin: int, end: int) -> None:
        """Run launches [begin, end) of a program in order."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for work in flight."""

    def run_on(self, handle: int, index: int, operands: Sequence[int | None]) -> None:
        """Run one launch on other operands, now and later: offsets in the arena, in the contract's order, None where it
        has none. Only a GPU's backend can."""
        raise NotImplementedError

    # For devices that work beside the host. What stands here is right for those that do not.

    def capture(self, handle: int, phase: int, rows: int) -> None:
        """At load: let later runs of the whole program replay one recording, in steps of `phase` of up to `rows` rows,
        sequences and logits. The smallest that holds a step is taken; a step that none holds is launched as ever."""
        del handle, phase, rows

    def read_later(self, offset: int, data: memoryview) -> None:
        """Copy from the arena to `staging` memory, in the order of the runs; there once a later fence is passed."""
        self.read(offset, np.frombuffer(data, np.uint8))

    def fence(self) -> int:
        """A ticket for everything begun so far."""
        return 0

    def wait(self, ticket: int) -> None:
        """Wait until all that a fence or an upload stands for is done. Raises DeviceError if the device failed."""
        del ticket

    def passed(self, ticket: int) -> bool:
        """Whether `wait` would return at once."""
        del ticket
        return True

    def upload(self, offset: int, data: memoryview) -> int:
        """Copy `staging` memory to the arena beside the runs. Returns the ticket after which `data` is free.

        Uploads and runs are ordered only by `order_runs` and `order_uploads`, for which the device waits, not the host.
        """
        self.write(offset, np.frombuffer(data, np.uint8))
        return 0

    def order_runs(self) -> None:
        """Runs from now on wait for the uploads so far."""
        return

    def order_uploads(self) -> None:
        """Uploads from now on wait for the runs so far."""
        return
