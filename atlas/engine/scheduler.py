"""The scheduler: decides what a step is. Knows nothing of devices.

Continuous batching: every step takes one row of each decoding sequence first, then fills the rest of
the row budget with prompt chunks, first come first served. A sequence that finds no free KV block
preempts the one admitted last, which is computed again later from its tokens: its text is the same,
since every kernel computes a row alike in any batch and chunk.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from atlas.engine.kv_cache import BlockPool
from atlas.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows of one sequence in a step: tokens [computed, computed + rows)."""

    sequence: Sequence
    rows: int

    @property
    def samples(self) -> bool:
        """The chunk reaches the end of the tokens, so the next token is sampled."""
        return self.sequence.computed + self.rows == len(self.sequence.tokens)


class Scheduler:
    """Queues and admission. `running` is in order of admission.

    max_logits: rows of one step whose logits can be computed, at least `max_seqs`.
    rope_set: a sequence's length -> which RoPE frequencies all its positions use.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_rows: int,
        max_seqs: int,
        n_slots: int,
        max_logits: int,
        rope_set: Callable[[int], int] = lambda length: 0,
    ) -> None:
        self.pool, self.max_rows, self.max_seqs, self.max_logits = pool, max_rows, max_seqs, max_logits
        self._rope_set = rope_set
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._slots = list(range(n_slots))[::-1]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.rope_set = self._rope_set(len(sequence.tokens))
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or aborted; its blocks and slot are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_back(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty when there is nothing to do.

        KV blocks for every chunk are allocated on return.
        """
        for sequence in self.running:
            # Frequencies follow from the length at the end of the step. Where the last token changes them, a
            # fresh prefill would turn every key otherwise than the cached ones are.
            if (rope_set := self._rope_set(len(sequence.tokens))) != sequence.rope_set:
                sequence.rope_set = rope_set
                sequence.restart()
        chunks: list[Chunk] = []
        for sequence in [s for s in self.running if s.pending == 1]:
            if sequence.slot >= 0 and self._reserve(sequence, 1, chunks):
                chunks.append(Chunk(sequence, 1))
        for sequence in [s for s in self.running if s.pending > 1]:
            rows = self._fit(sequence, chunks)
            if rows > 0 and sequence.slot >= 0 and self._reserve(sequence, rows, chunks):
                chunks.append(Chunk(sequence, rows))
        while self.waiting and self._slots and len(self.running) < self.max_seqs:
            sequence = self.waiting[0]
            rows = self._fit(sequence, chunks)
            # The whole prompt must fit now, or a half-prefilled sequence would soon be preempted.
            if rows == 0 or sequence.blocks_missing(sequence.pending) > self.pool.free:
                break
            self.waiting.popleft()
            sequence.slot = self._slots.pop()
            self.running.append(sequence)
            sequence.blocks += self.pool.allocate(sequence.blocks_missing(rows))
            chunks.append(Chunk(sequence, rows))
        return chunks

    def _fit(self, sequence: Sequence, chunks: list[Chunk]) -> int:
        """How many pending rows of `sequence` the step still has room for beside `chunks`."""
        rows = min(sequence.pending, self.max_rows - sum(chunk.rows for chunk in chunks))
        logits = self.max_logits - sum(chunk.sequence.logit_rows(chunk.rows) for chunk in chunks)
        while (excess := sequence.logit_rows(rows) - logits) > 0:
            rows -= excess
        return rows

    def _reserve(self, sequence: Sequence, rows: int, chunks: list[Chunk]) -> bool:
        """Allocate blocks for `rows`, preempting later admissions. False: the sequence itself was preempted."""
        missing = sequence.blocks_missing(rows)
        while missing > self.pool.free:
            victim = self.running[-1]
            self._preempt(victim)
            chunks[:] = [chunk for chunk in chunks if chunk.sequence is not victim]
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self._give_back(victim)
        victim.preempt()
        self.waiting.appendleft(victim)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self._slots.append(sequence.slot)
        sequence.blocks, sequence.slot = [], -1
