"""Writes a step's chunks into the step block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as List

import numpy as np

from atlas.engine.sampling import SamplingParams
from atlas.engine.scheduler import Chunk
from atlas.engine.sequence import Sequence
from atlas.ops.adjust_logits import ADJUST_BIAS, ADJUST_MASK, ADJUST_PENALTIES
from atlas.runtime.step import FIELDS, PHASE_PREFILL, ROW_DECODE, ROW_PREFILL, StepBlock

MAX_TOP_K = 2**31 - 1
"""What the field holds; more than any vocabulary has."""

_PARAMETERS = (
    *("logit_adjust", "logit_n_top", "logit_temperature", "logit_top_k", "logit_top_p", "logit_min_p", "logit_seed"),
    *("logit_repetition", "logit_frequency", "logit_presence"),
)
"""Fields of a logit row that are the same in every step of a sequence, in the order of `_parameters`."""


class SlotParameters:
    """How the sequence of each slot is sampled: an array for each of `_PARAMETERS`, so that a step's logit rows take
    theirs by one indexing of each. The last entry is for rows that only report log-probabilities."""

    def __init__(self, n_slots: int) -> None:
        dtypes = {field.name: np.dtype(field.dtype.replace("i", "int").replace("f", "float")) for field in FIELDS}
        self.arrays = {name: np.zeros(n_slots + 1, dtypes[name]) for name in _PARAMETERS}
        self.reporting = n_slots
        self.write(n_slots, SamplingParams(max_tokens=1, temperature=0.0))

    def write(self, slot: int, params: SamplingParams) -> None:
        """`slot` belongs to a sequence with these parameters."""
        adjust = ADJUST_BIAS if params.logit_bias else 0
        adjust |= ADJUST_PENALTIES if params.penalises else 0
        values = (
            adjust,
            -1 if params.logprobs is None else params.logprobs,
            params.temperature,
            min(params.top_k, MAX_TOP_K),
            params.top_p,
            params.min_p,
            params.seed,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        for array, value in zip(self.arrays.values(), values, strict=True):
            array[slot] = value


@dataclasses.dataclass
class LogitRows:
    """The rows of logits that a step yields.

    sequences: whose they are; those of one sequence stand together and in order of position.
    targets: row -> position of the prompt token whose log-probability is wanted. From other rows a token is sampled.
    masked: sequences with a mask that has to be delivered before sampling, in the order of the masks, each with the
        tokens that it has generated before this step.
    logprobs: some row wants log-probabilities.
    pooled: some row is for an embedding.
    """

    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    targets: dict[int, int] = dataclasses.field(default_factory=dict)
    masked: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    logprobs: bool = False
    pooled: bool = False


def fill(block: StepBlock, chunks: List[Chunk], slots: SlotParameters, phase: int = PHASE_PREFILL) -> LogitRows:
    """Fill the block. Returns its logit rows.

    A decoding row names no token: the device still holds it in the sequence's slot, so the row can be
    scheduled before the host has seen the token.

    Almost everything here is done once a step for a whole array and not once a row: the host must be done before
    the device is, which takes 2 ms for 128 rows of a small model.
    """
    block.set_phase(phase)
    sequences = [chunk.sequence for chunk in chunks]
    rows = np.array([chunk.rows for chunk in chunks], np.int32)
    begins = np.array([sequence.computed for sequence in sequences], np.int32)
    ends = np.cumsum(rows, dtype=np.int32)
    firsts, n_rows = ends - rows, int(ends[-1])
    samples = begins + rows == np.array([sequence.length for sequence in sequences], np.int32)
    block.row_token[:n_rows] = -1
    block.row_position[:n_rows] = np.arange(n_rows) + np.repeat(begins - firsts, rows)
    block.row_seq[:n_rows] = np.repeat(np.arange(len(chunks)), rows)
    block.row_kind[:n_rows] = np.repeat(np.where(samples & (rows == 1), ROW_DECODE, ROW_PREFILL), rows)
    block.seq_slot[: len(chunks)] = [sequence.slot for sequence in sequences]
    block.seq_rope[: len(chunks)] = [sequence.rope_set for sequence in sequences]
    logits = LogitRows()
    logit_rows: list[int] = []
    owners: list[int] = []
    masks: list[int] = []
    for index, (chunk, first, sampled) in enumerate(zip(chunks, firsts.tolist(), samples.tolist(), strict=True)):
        sequence, begin = chunk.sequence, chunk.sequence.computed
        logits.pooled = logits.pooled or sequence.sampling.pooling is not None
        block.block_table[index, : len(sequence.table)] = sequence.table
        if not sequence.last_token_on_device:
            block.row_token[first : first + chunk.rows] = sequence.tokens[begin : begin + chunk.rows]
        for target in sequence.prompt_targets(chunk.rows):
            logits.targets[len(logit_rows)] = target
            logits.sequences.append(sequence)
            logit_rows.append(first + target - 1 - begin)
            owners.append(slots.reporting)
        if sampled:
            if sequence.masked:
                logits.masked.append((sequence, sequence.generated))
                masks.append(len(logit_rows))
            logits.sequences.append(sequence)
            logit_rows.append(first + chunk.rows - 1)
            owners.append(sequence.slot)
    _fill_logits(block, logits, logit_rows, owners, masks, slots)
    block.set_symbols({"n_rows": n_rows, "n_seqs": len(chunks), "n_logits": len(logit_rows)})
    return logits


def _fill_logits(
    block: StepBlock, logits: LogitRows, rows: list[int], owners: list[int], masks: list[int], slots: SlotParameters
) -> None:
    """The fields of logit rows. rows, owners: by logit row, its row of the step and its entry of `slots`. masks: the
    logit rows that have one."""
    n, index = len(rows), np.array(owners, np.intp)
    for name, array in slots.arrays.items():
        block.fields[name][:n] = array[index]
    block.logit_row[:n] = rows
    block.logit_slot[:n] = index
    block.logit_position[:n] = [sequence.length for sequence in logits.sequences]
    block.logit_mask[:n] = block.logit_target[:n] = -1
    for row, target in logits.targets.items():
        sequence = logits.sequences[row]
        block.logit_slot[row], block.logit_position[row] = -1, target
        block.logit_target[row], block.logit_n_top[row] = sequence.tokens[target], sequence.sampling.prompt_logprobs
    if masks:
        block.logit_mask[masks] = np.arange(len(masks))
        block.logit_adjust[masks] |= ADJUST_MASK
    logits.logprobs = bool((block.logit_n_top[:n] >= 0).any())
