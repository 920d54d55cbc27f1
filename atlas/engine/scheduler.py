"""The scheduler: decides what a step is. Knows nothing of devices.

Continuous batching: every step takes one row of each decoding sequence first, then fills the rest of
the row budget with prompt chunks, lower `priority` first, equals first come first served. A sequence that finds no
free KV block preempts the one of the highest `priority` number, of equals the one admitted last, which is computed
again later from its tokens: its text is the same, since every kernel computes a row alike in any batch and chunk.
Nothing runs for the sake of fairness: as long as others of a lower number take all the room, a sequence waits.

Where kernels differ between prompt rows and rows of generated tokens (a backend with phases), a step has rows
of one kind, prefill and decode steps take turns, and a sequence that is computed again has each of its tokens
computed by the kind of step that computed it first: so its text is the same there too.
"""

from __future__ import annotations

import dataclasses
from bisect import insort_left, insort_right
from collections.abc import Callable

from atlas.engine.kv_cache import BlockPool
from atlas.engine.sequence import Sequence
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL


@dataclasses.dataclass(slots=True)
class Chunk:
    """Rows of one sequence in a step: tokens [computed, computed + rows)."""

    sequence: Sequence
    rows: int

    @property
    def samples(self) -> bool:
        """The chunk reaches the end of the tokens, so the next token is sampled."""
        return self.sequence.computed + self.rows == self.sequence.length


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step: its chunks, and the phase whose kernels run it."""

    chunks: list[Chunk]
    phase: int = PHASE_PREFILL


def _priority(sequence: Sequence) -> int:
    return sequence.sampling.priority


class _Budget:
    """A step in the making: its chunks, and what is left of its rows and logit rows."""

    def __init__(self, rows: int, logits: int) -> None:
        self.chunks: list[Chunk] = []
        self.rows, self.logits = rows, logits

    def add(self, sequence: Sequence, rows: int) -> None:
        self.chunks.append(Chunk(sequence, rows))
        self.rows -= rows
        self.logits -= sequence.logit_rows(rows)

    def drop(self, sequence: Sequence) -> None:
        """Take a preempted sequence's chunk out, before the sequence forgets what it was."""
        for chunk in [chunk for chunk in self.chunks if chunk.sequence is sequence]:
            self.chunks.remove(chunk)
            self.rows += chunk.rows
            self.logits += sequence.logit_rows(chunk.rows)


class _InFlightError(Exception):
    """What has to be done needs tokens that the host has not seen."""


class Scheduler:
    """Queues and admission. `waiting` and `running` are in order of priority, equals of arrival and of admission.

    max_logits: rows of one step whose logits can be computed, at least `max_seqs`.
    rope_set: a sequence's length -> which RoPE frequencies all its positions use; None: there is but one set.
    max_context: tokens of one sequence.
    decode_rows: rows of one decode step, on a backend with phases; 0: rows of all kinds share steps.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_rows: int,
        max_seqs: int,
        n_slots: int,
        max_logits: int,
        rope_set: Callable[[int], int] | None = None,
        max_context: int = 2**31,
        decode_rows: int = 0,
    ) -> None:
        self.pool, self.max_rows, self.max_seqs, self.max_logits = pool, max_rows, max_seqs, max_logits
        self._rope_set, self._max_context, self._decode_rows = rope_set, max_context, decode_rows
        self._prefilled_last = self._behind_first = False
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._slots = list(range(n_slots))[::-1]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.last_length = min(sequence.last_length, self._max_context)
        if self._rope_set is not None:
            sequence.rope_set = self._rope_set(sequence.length)
        insort_right(self.waiting, sequence, key=_priority)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or aborted; its blocks and slot are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_back(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self, drained: bool = True) -> Plan | None:
        """The next step; without chunks when there is nothing to do.

        KV blocks for every chunk are allocated on return.

        drained: no submitted step's tokens are unknown. A preemption has to know them, so where one is needed and
            some are not, the result is None: collect them and ask again.
        """
        try:
            self._turn_ropes(drained)
            return self._plan(drained)
        except _InFlightError:
            return None

    def _turn_ropes(self, drained: bool) -> None:
        """Restart sequences whose last token changed the RoPE frequencies of all."""
        if self._rope_set is None:
            return
        for sequence in self.running:
            # Frequencies follow from the length at the end of the step. Where the last token changes them, a
            # fresh prefill would turn every key otherwise than the cached ones are.
            if (rope_set := self._rope_set(sequence.length)) != sequence.rope_set:
                if not drained:
                    raise _InFlightError
                sequence.rope_set = rope_set
                sequence.restart()

    def _plan(self, drained: bool) -> Plan:
        running = [s for s in self.running if s.length < s.last_length]
        if not self._decode_rows:
            step = _Budget(self.max_rows, self.max_logits)
            self._continue([s for s in running if s.pending == 1], step, drained)
            self._continue([s for s in running if s.pending > 1], step, drained)
            self._admit(step)
            return Plan(step.chunks)
        decoding = [s for s in running if s.computed >= s.prompt_length]
        phases = [PHASE_DECODE, PHASE_PREFILL] if self._prefilled_last and decoding else [PHASE_PREFILL, PHASE_DECODE]
        for phase in phases:
            if phase == PHASE_DECODE:
                step = _Budget(self._decode_rows, self.max_logits)
                # Who computes tokens again could fill many steps, or be left one row of each: it takes turns with
                # those that are at their last token.
                self._behind_first = not self._behind_first
                decoding.sort(key=lambda s: s.last_token_on_device, reverse=not self._behind_first)
                # Preempted by a phase that came to nothing: no longer running.
                self._continue([s for s in decoding if s.slot >= 0], step, drained)
            else:
                step = _Budget(self.max_rows, self.max_logits)
                self._continue([s for s in running if s.computed < s.prompt_length], step, drained)
                self._admit(step)
            if step.chunks:
                self._prefilled_last = phase == PHASE_PREFILL
                return Plan(step.chunks, phase)
        return Plan([])

    def _continue(self, sequences: list[Sequence], step: _Budget, drained: bool) -> None:
        """Chunks of running sequences, as far as rows, logit rows and KV blocks reach."""
        for sequence in sequences:
            rows = self._fit(sequence, step)
            if rows > 0 and sequence.slot >= 0 and self._reserve(sequence, rows, step, drained):
                step.add(sequence, rows)

    def _admit(self, step: _Budget) -> None:
        """Chunks of waiting sequences, as long as the next one finds room."""
        while self.waiting and self._slots and len(self.running) < self.max_seqs:
            sequence = self.waiting[0]
            rows = self._fit(sequence, step)
            # The whole prompt must fit now, or a half-prefilled sequence would soon be preempted.
            if rows == 0 or sequence.blocks_missing(sequence.pending) > self.pool.free:
                break
            self.waiting.pop(0)
            sequence.slot = self._slots.pop()
            insort_right(self.running, sequence, key=_priority)
            sequence.add_blocks(self.pool.allocate(sequence.blocks_missing(rows)))
            step.add(sequence, rows)

    def _fit(self, sequence: Sequence, step: _Budget) -> int:
        """How many pending rows of `sequence` the step still has room for."""
        pending = sequence.pending
        if self._decode_rows and sequence.computed < sequence.prompt_length:
            pending = sequence.prompt_length - sequence.computed  # a prefill step has prompt rows only
        rows = min(pending, step.rows)
        while (excess := sequence.logit_rows(rows) - step.logits) > 0:
            rows -= excess
        return rows

    def _reserve(self, sequence: Sequence, rows: int, step: _Budget, drained: bool) -> bool:
        """Allocate blocks for `rows`, preempting the last of `running`. False: the sequence itself was preempted."""
        missing = sequence.blocks_missing(rows)
        while missing > self.pool.free:
            if not drained:
                raise _InFlightError
            victim = self.running[-1]
            step.drop(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.add_blocks(self.pool.allocate(missing))
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self._give_back(victim)
        victim.preempt()
        insort_left(self.waiting, victim, key=_priority)  # it ran before all of its priority that wait

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.take_blocks())
        self._slots.append(sequence.slot)
        sequence.slot = -1
