"""Writes a step's chunks into the step block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as List

import numpy as np

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
    row = 0
    logits: list[LogitRow] = []
    masks = 0
    block.set_phase(phase)
    for index, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, row + chunk.rows
        begin = sequence.computed
        if sequence.last_token_on_device:
            block.row_token[row:end] = -1
        else:
            block.row_token[row:end] = sequence.tokens[begin : begin + chunk.rows]
        block.row_seq[row:end] = index
        block.row_position[row:end] = np.arange(begin, begin + chunk.rows)
        block.row_kind[row:end] = ROW_DECODE if chunk.samples and chunk.rows == 1 else ROW_PREFILL
        block.seq_slot[index] = sequence.slot
        block.seq_rope[index] = sequence.rope_set
        block.block_table[index, : len(sequence.blocks)] = sequence.blocks
        for target in sequence.prompt_targets(chunk.rows):
            _report(block, len(logits), row + target - 1 - begin, target, sequence)
            logits.append(LogitRow(sequence, target, sequence.sampling.prompt_logprobs))
        if chunk.samples:
            mask = masks if sequence.masked else None
            masks += mask is not None
            _sample(block, len(logits), end - 1, sequence, mask)
            logits.append(LogitRow(sequence, None, sequence.sampling.logprobs, mask))
        row = end
    block.set_symbols({"n_rows": row, "n_seqs": len(chunks), "n_logits": len(logits)})
    return logits


def _report(block: StepBlock, i: int, row: int, target: int, sequence: Sequence) -> None:
    """Logit row `i` is `row`'s, for the log-probability of the prompt token at `target`."""
    block.logit_row[i] = row
    block.logit_slot[i] = block.logit_mask[i] = -1
    block.logit_position[i] = target
    block.logit_temperature[i] = 0.0
    block.logit_adjust[i] = 0
    block.logit_n_top[i] = sequence.sampling.prompt_logprobs
    block.logit_target[i] = sequence.tokens[target]


def _sample(block: StepBlock, i: int, row: int, sequence: Sequence, mask: int | None) -> None:
    """Logit row `i` is `row`'s, and the sequence's next token is sampled from it."""
    params = sequence.sampling
    adjust = ADJUST_BIAS if params.logit_bias else 0
    adjust |= ADJUST_PENALTIES if params.penalises else 0
    adjust |= ADJUST_MASK if mask is not None else 0
    block.logit_row[i] = row
    block.logit_slot[i] = sequence.slot
    block.logit_position[i] = sequence.length
    block.logit_temperature[i] = params.temperature
    block.logit_top_k[i] = min(params.top_k, MAX_TOP_K)
    block.logit_top_p[i] = params.top_p
    block.logit_min_p[i] = params.min_p
    block.logit_seed[i] = params.seed
    block.logit_adjust[i] = adjust
    block.logit_repetition[i] = params.repetition_penalty
    block.logit_frequency[i] = params.frequency_penalty
    block.logit_presence[i] = params.presence_penalty
    block.logit_mask[i] = -1 if mask is None else mask
    block.logit_n_top[i] = -1 if params.logprobs is None else params.logprobs
    block.logit_target[i] = -1
