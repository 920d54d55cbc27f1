"""Packed weights on their way to a device: pinned slots that threads fill and the device copies from."""

from __future__ import annotations

from collections import deque

import numpy as np

from atlas.runtime.backend import Array, Backend


class Slot:
    """One slot of pinned memory. `fill` may be called on any thread; only the slot's user touches it."""

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.used = memory, 0

    def view(self, nbytes: int) -> Array:
        """The first bytes of the slot, to be filled: uint8 [nbytes]."""
        self.used = nbytes
        return np.frombuffer(self.memory, np.uint8)[:nbytes]

    def fill(self, packed: Array) -> None:
        """Copy a packed run into the slot. It must fit."""
        raw = packed.reshape(-1).view(np.uint8)
        self.view(raw.nbytes)[:] = raw


class Uploads:
    """A ring of up to `slots` slots of `nbytes`. All methods belong to the thread that calls the backend."""

    def __init__(self, backend: Backend, slots: int, nbytes: int) -> None:
        self._backend, self._nbytes, self._left = backend, nbytes, slots
        self._busy: deque[tuple[int, Slot]] = deque()

    def take(self) -> Slot:
        """A slot to fill. Waits for the device if it still copies from all that are not being filled, of which there
        must be some. Memory is pinned as it is needed: the first slots are filled meanwhile."""
        if self._left:
            self._left -= 1
            return Slot(self._backend.staging(self._nbytes))
        return self._sent()

    def send(self, offset: int, slot: Slot) -> None:
        """Start copying what was filled to the arena at `offset`; the slot is free again once that is done."""
        self._busy.append((self._backend.upload(offset, slot.memory[: slot.used]), slot))

    def finish(self) -> None:
        """Wait until everything has arrived, and give the memory back."""
        while self._busy:
            self._backend.release(self._sent().memory)

    def _sent(self) -> Slot:
        """The slot that was sent first, once it is free."""
        ticket, slot = self._busy.popleft()
        self._backend.wait(ticket)
        return slot
