"""Teacher-forced logits and what follows from them. Runs in the engine's thread, between its steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from atlas.engine.engine import Engine
from atlas.engine.sampling import SamplingParams
from atlas.engine.scheduler import Chunk
from atlas.engine.sequence import Sequence as EngineSequence
from atlas.engine.step_builder import SlotParameters, fill
from atlas.targets.shape import KV_BLOCK_SIZE

Array = npt.NDArray[Any]
Consume = Callable[[int, int, Array], None]
"""Called with (index of the sequence, position of the first row, float32 logits [rows, vocab])."""

BLOCK_TOKENS = 64
"""Tokens of one block of a confidence interval: neighbouring tokens are alike, blocks of so many much less."""

_Z95 = 1.959964


@dataclasses.dataclass(frozen=True)
class Scored:
    """One sequence; logits are wanted from position `wanted_from` on."""

    tokens: list[int]
    wanted_from: int = 0

    @property
    def blocks(self) -> int:
        """KV blocks that it takes."""
        return -(-len(self.tokens) // KV_BLOCK_SIZE)


def groups(sequences: Sequence[Scored], blocks: int, n_seqs: int) -> Iterator[list[int]]:
    """Indices of successive sequences that fit into so many KV blocks together."""
    group: list[int] = []
    used = 0
    for index, sequence in enumerate(sequences):
        if group and (used + sequence.blocks > blocks or len(group) == n_seqs):
            yield group
            group, used = [], 0
        group.append(index)
        used += sequence.blocks
    if group:
        yield group


def run(
    engine: Engine, sequences: Sequence[Scored], group: Sequence[int], consume: Consume, go_on: Callable[[], bool]
) -> None:
    """Compute one group: its sequences share steps, each step limited by the rows and logit rows that the model
    was loaded for. Before each, `go_on` is asked; it may raise. Every KV block is given back, whatever happens."""
    runner = engine.runner
    pending: list[tuple[int, EngineSequence]] = []
    try:
        for index in group:
            sequence = EngineSequence("", 0, sequences[index].tokens, SamplingParams(max_tokens=1))
            sequence.slot = 0  # read by nobody: every row names its token
            sequence.rope_set = runner.config.rope_set(len(sequence.tokens))
            sequence.add_blocks(engine.pool.allocate(sequences[index].blocks))
            pending.append((index, sequence))
        unfinished, slots = list(pending), SlotParameters(1)
        while unfinished and go_on():
            chunks, wanted = _plan(unfinished, sequences, runner.limits.n_rows, runner.limits.n_logits)
            fill(runner.block, chunks, slots)
            rows = np.concatenate([np.arange(end - count, end) for _, _, count, end in wanted])
            runner.block.logit_row[: len(rows)] = rows
            runner.block.set_symbols({"n_logits": len(rows)})
            runner.forward()
            if len(rows):
                logits, row = runner.logits(), 0
                for index, position, count, _ in wanted:
                    if count:
                        consume(index, position, logits[row : row + count])
                    row += count
            else:
                runner.backend.synchronize()  # the device must be done with the block before it is refilled
            for chunk in chunks:
                chunk.sequence.computed += chunk.rows
            unfinished = [(index, sequence) for index, sequence in unfinished if sequence.pending]
    finally:
        for _, sequence in pending:
            engine.pool.release(sequence.blocks)


def _plan(
    unfinished: Sequence[tuple[int, EngineSequence]], sequences: Sequence[Scored], rows: int, logits: int
) -> tuple[list[Chunk], list[tuple[int, int, int, int]]]:
    """The step's chunks, and for each (sequence, position of its first logits, how many, row after its last)."""
    chunks, wanted, row = [], [], 0
    for index, sequence in unfinished:
        silent = max(0, sequences[index].wanted_from - sequence.computed)
        count = min(sequence.pending, rows - row, silent + logits)
        if count <= 0:
            break
        speaking = max(0, count - silent)
        chunks.append(Chunk(sequence, count))
        row += count
        logits -= speaking
        wanted.append((index, sequence.computed + count - speaking, speaking, row))
    return chunks, wanted


# ---- perplexity ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    perplexity: exp(nll).      nll: mean negative log-likelihood of the scored tokens, in nats.
    interval: 95 % confidence interval of the perplexity: normal, over the means of blocks of 64 consecutive tokens.
    tokens: how many were scored: all but the first of the text.
    window, stride: tokens are scored in windows of `window` tokens, each `stride` after the one before; a window scores
        its last `stride` tokens (the first one all of its own but the first), so each has at least
        window - stride tokens before it where the text has them. A window begins where it begins: no BOS is put there.
    token_nll: float64 [tokens], in order.
    """

    perplexity: float
    nll: float
    interval: tuple[float, float]
    tokens: int
    window: int
    stride: int
    token_nll: Array = dataclasses.field(repr=False)


def windows(tokens: Sequence[int], window: int, stride: int) -> list[tuple[int, Scored]]:
    """The windows of a text: (position of the window's first token, window). Each scores what those before left."""
    result, done, begin = [], 1, 0
    while done < len(tokens):
        end = min(begin + window, len(tokens))
        # Row p predicts token p + 1, so the last token of a window is a target only.
        result.append((begin, Scored(list(tokens[begin : end - 1]), done - 1 - begin)))
        done, begin = end, begin + stride
    return result


def log_softmax(logits: Array) -> Array:
    """Natural log-probabilities, float64 [rows, vocab]; a NaN makes its row NaN."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    wide = shifted.astype(np.float64)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))


def token_nll(logits: Array, targets: Array) -> Array:
    """Negative log-likelihood of `targets` [rows], float64; exponentials in float32, summed in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, dtype=np.float64)
    return np.asarray(np.log(total) - shifted[np.arange(len(targets)), targets].astype(np.float64))


def block_means(values: Array) -> Array:
    """Means of blocks of BLOCK_TOKENS consecutive values; what is left at the end joins the last block."""
    count = max(1, len(values) // BLOCK_TOKENS)
    return np.array([part.mean() for part in np.array_split(values, count)])


def mean_interval(values: Array) -> tuple[float, float]:
    """95 % normal interval of the mean of `values`, from block means; infinite where there are too few blocks."""
    means = block_means(values)
    mean = float(values.mean())
    half = _Z95 * float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    return mean - half, mean + half


def perplexity_of(nll: Array, window: int, stride: int) -> Perplexity:
    """The result for per-token values."""
    low, high = mean_interval(nll)
    mean = float(nll.mean())

    def exp(value: float) -> float:
        return math.exp(value) if value < 700 else math.inf

    return Perplexity(exp(mean), mean, (exp(low), exp(high)), len(nll), window, stride, nll)
