"""What the engine's steps come to: a few additions a step, told when somebody asks."""

from __future__ import annotations

from atlas.engine.messages import Work

SIZES = 18
"""Classes of steps by rows or sequences: up to 1, 2, 4, ... 65,536 (the most that `max_rows` may be), and more."""


class WorkCount:
    """Running sums of `Work`; its fields say what they are."""

    def __init__(self) -> None:
        self.schedule = self.wait = self.output = self.masks = 0.0
        self.grammar_errors = 0
        self._submit = 0.0
        self._rows = self._sequences = 0
        self._by_rows, self._by_sequences = [0] * SIZES, [0] * SIZES

    def submitted(self, rows: int, sequences: int, seconds: float) -> None:
        """A step of so many rows and sequences, which the backend took in so many seconds."""
        self._rows += rows
        self._sequences += sequences
        self._by_rows[min((rows - 1).bit_length(), SIZES - 1)] += 1
        self._by_sequences[min((sequences - 1).bit_length(), SIZES - 1)] += 1
        self._submit += seconds

    def so_far(self) -> Work:
        """The sums now."""
        return Work(
            self._rows,
            self._sequences,
            list(self._by_rows),
            list(self._by_sequences),
            self.schedule,
            self._submit,
            self.wait,
            self.output,
            self.masks,
            self.grammar_errors,
        )
