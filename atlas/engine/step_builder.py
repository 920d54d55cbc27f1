"""Writes a step's chunks into the step block."""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np

from atlas.engine.scheduler import Chunk
from atlas.runtime.step import ROW_DECODE, ROW_PREFILL, StepBlock


def fill(block: StepBlock, chunks: List[Chunk]) -> list[Chunk]:
    """Fill the block. Returns the chunks that sample, in the order of the block's logit rows.

    A decoding row names no token: the device still holds it in the sequence's slot, so the row can be
    scheduled before the host has seen the token.
    """
    row = 0
    sampling: list[Chunk] = []
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
        block.block_table[index, : len(sequence.blocks)] = sequence.blocks
        if chunk.samples:
            params, i = sequence.sampling, len(sampling)
            block.logit_row[i] = end - 1
            block.logit_slot[i] = sequence.slot
            block.logit_position[i] = len(sequence.tokens)
            block.logit_temperature[i] = params.temperature
            block.logit_top_k[i] = params.top_k
            block.logit_top_p[i] = params.top_p
            block.logit_mask[i] = -1
            block.logit_seed[i] = params.seed
            sampling.append(chunk)
        row = end
    block.set_symbols({"n_rows": row, "n_seqs": len(chunks), "n_logits": len(sampling)})
    return sampling
