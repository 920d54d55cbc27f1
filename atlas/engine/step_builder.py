"""Writes a step's chunks into the step block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as List

from atlas.engine.scheduler import Chunk
from atlas.engine.sequence import Sequence
from atlas.ops.adjust_logits import ADJUST_BIAS, ADJUST_MASK, ADJUST_PENALTIES
from atlas.runtime.step import PHASE_PREFILL, ROW_DECODE, ROW_PREFILL, StepBlock

MAX_TOP_K = 2**31 - 1
"""What the field holds; more than any vocabulary has."""


@dataclasses.dataclass(frozen=True)
class LogitRow:
    """One row of logits that a step yields.

    target: position of the prompt token whose log-probability is wanted; None: the next token is sampled.
    n_top: likeliest tokens to report; None: no log-probabilities.
    mask: row of the mask that has to be delivered before sampling; None: no mask.
    """

    sequence: Sequence
    target: int | None
    n_top: int | None
    mask: int | None = None


def fill(block: StepBlock, chunks: List[Chunk], phase: int = PHASE_PREFILL) -> list[LogitRow]:
    """Fill the block. Returns its logit rows, those of one sequence together and in order of position.

    A decoding row names no token: the device still holds it in the sequence's slot, so the row can be
    scheduled before the host has seen the token.
    """
    block.set_phase(phase)
    tokens: list[int] = []
    positions: list[int] = []
    seqs: list[int] = []
    kinds: list[int] = []
    slots: list[int] = []
    ropes: list[int] = []
    logits: list[LogitRow] = []
    fields: list[tuple[float, ...]] = []
    masks = 0
    for index, chunk in enumerate(chunks):
        sequence, rows, begin, samples = chunk.sequence, chunk.rows, chunk.sequence.computed, chunk.samples
        row = len(tokens)
        tokens += [-1] * rows if sequence.last_token_on_device else sequence.tokens[begin : begin + rows]
        positions += range(begin, begin + rows)
        seqs += [index] * rows
        kinds += [ROW_DECODE if samples and rows == 1 else ROW_PREFILL] * rows
        slots.append(sequence.slot)
        ropes.append(sequence.rope_set)
        table = sequence.block_table()
        block.block_table[index, : len(table)] = table
        for target in sequence.prompt_targets(rows):
            fields.append(_report(row + target - 1 - begin, target, sequence))
            logits.append(LogitRow(sequence, target, sequence.sampling.prompt_logprobs))
        if samples:
            mask = masks if sequence.masked else None
            masks += mask is not None
            fields.append(_sample(row + rows - 1, sequence, mask))
            logits.append(LogitRow(sequence, None, sequence.sampling.logprobs, mask))
    # One assignment a field, not one an entry: the host must be done before the device is.
    block.row_token[: len(tokens)] = tokens
    block.row_position[: len(tokens)] = positions
    block.row_seq[: len(tokens)] = seqs
    block.row_kind[: len(tokens)] = kinds
    block.seq_slot[: len(chunks)] = slots
    block.seq_rope[: len(chunks)] = ropes
    for name, values in zip(_LOGIT_FIELDS, zip(*fields, strict=True), strict=False):
        getattr(block, name)[: len(fields)] = values
    block.set_symbols({"n_rows": len(tokens), "n_seqs": len(chunks), "n_logits": len(logits)})
    return logits


_LOGIT_FIELDS = (
    *("logit_row", "logit_slot", "logit_mask", "logit_position", "logit_adjust", "logit_n_top", "logit_target"),
    *("logit_temperature", "logit_top_k", "logit_top_p", "logit_min_p", "logit_seed"),
    *("logit_repetition", "logit_frequency", "logit_presence"),
)
"""In the order in which the two below give a logit row's values."""


def _report(row: int, target: int, sequence: Sequence) -> tuple[float, ...]:
    """A logit row of row `row` for the log-probability of the prompt token at `target`. Nothing is sampled."""
    n_top = sequence.sampling.prompt_logprobs
    assert n_top is not None
    return (row, -1, -1, target, 0, n_top, sequence.tokens[target], 0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0)


def _sample(row: int, sequence: Sequence, mask: int | None) -> tuple[float, ...]:
    """A logit row of row `row` from which the sequence's next token is sampled."""
    params = sequence.sampling
    adjust = ADJUST_BIAS if params.logit_bias else 0
    adjust |= ADJUST_PENALTIES if params.penalises else 0
    adjust |= ADJUST_MASK if mask is not None else 0
    return (
        row,
        sequence.slot,
        -1 if mask is None else mask,
        sequence.length,
        adjust,
        -1 if params.logprobs is None else params.logprobs,
        -1,
        params.temperature,
        min(params.top_k, MAX_TOP_K),
        params.top_p,
        params.min_p,
        params.seed,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
