"""What the device needs from the host to sample one sequence: a mask, and rows of its slot's state."""

from __future__ import annotations

import functools

import numpy as np

from atlas.engine.constraint import Masks
from atlas.engine.sampling import SamplingParams
from atlas.engine.sequence import Sequence
from atlas.ops.adjust_logits import COUNT_PROMPT
from atlas.runtime.backend import Array


def token_masks(masked: list[tuple[Sequence, int]], vocab: int, masks: Masks, matched_vocab: int) -> Array:
    """Which tokens may come next, as bits: uint32 [len(masked), ceil(vocab / 32)], bit v % 32 of word v // 32.

    Everything that forbids tokens meets here, so that a row has one mask.

    masked: sequences, each with the tokens that it had generated before.  matched_vocab: tokens of the tokenizer.
    """
    rows = np.empty((len(masked), -(-vocab // 32)), np.uint32)
    masks.fill(rows, [sequence.constraint for sequence, _ in masked], matched_vocab)
    for row, (sequence, generated) in zip(rows, masked, strict=True):
        ends = sequence.sampling.stop_token_ids if generated < sequence.sampling.min_tokens else ()
        if sequence.constraint is None:
            row[:] = _all_but(ends, vocab)
        elif ends:
            later = row & _all_but(ends, vocab)
            if later.any():  # else a grammar's text is complete, and nothing but an end can follow
                row[:] = later
    return rows


@functools.lru_cache(maxsize=64)  # most requests to a model forbid the same tokens, step after step
def _all_but(tokens: tuple[int, ...], vocab: int) -> Array:
    allowed = np.ones(-(-vocab // 32) * 32, np.bool_)
    allowed[list(tokens)] = False
    mask = np.packbits(allowed, bitorder="little").view("<u4")
    mask.flags.writeable = False
    return mask


def bias_row(params: SamplingParams, vocab: int) -> Array:
    """What is added to each logit: float32 [vocab]."""
    row = np.zeros(vocab, np.float32)
    row[list(params.logit_bias)] = list(params.logit_bias.values())
    return row


def count_row(sequence: Sequence, vocab: int) -> Array:
    """Where and how often each token has occurred: int32 [vocab], as `adjust_logits` reads it.

    Written whole when a sequence gets its slot: whatever part of the prompt runs in which chunk, is computed
    again after a preemption or not at all, the counts are right. From then on `sample` counts on the device.
    """
    counts = np.zeros(vocab, np.uint32)
    for token in sequence.tokens[sequence.prompt_length :]:  # none, unless it was preempted
        counts[token] += 1
    counts[sequence.tokens[: sequence.prompt_length]] |= np.uint32(COUNT_PROMPT)
    return counts.view(np.int32)
