"""One sequence: its tokens, and how far the device has come with them."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from atlas.engine.constraint import Constraint
from atlas.engine.messages import SamplingParams
from atlas.runtime.backend import Array
from atlas.targets.shape import KV_BLOCK_SIZE

_NO_BLOCKS: Array = np.zeros(0, np.int32)


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request while it is in the engine.

    tokens: prompt, then generated tokens; the only record of both.
    length: tokens, with those that submitted steps sample after them and the host has not seen.
    last_length: the length with all the tokens that were asked for. Stop tokens end a sequence earlier.
    computed: leading tokens whose K and V are in the cache once the submitted steps have run. One source of
        truth: every position that a step uses is derived from it.
    blocks: KV blocks in order; empty while waiting.  slot: its row of per-slot state, -1 while waiting.
    rope_set: the RoPE frequencies that the cached keys were turned by. A function of the sequence's length
        (ModelConfig.rope_set); the scheduler keeps it.
    last_token_on_device: the last token is, or will be, sampled into the slot by the previous step.
    slot_ready: the slot holds this sequence's bias and token counts (where it uses them).
    table: `blocks` as an int32 array.
    prompt_reported: leading prompt tokens whose log-probabilities need not be sent: they were, or nobody can
        say (the first). A sequence that is computed again after a preemption reports nothing twice.
    constraint: what its next token may be, from the tokens so far; None: it is free.
    pooled: the sum of the rows that its embedding is the mean of, or the one that it is; None: none came yet.
    arrived, started: when the engine got it, and when it was first given a slot (0: it was not), on `perf_counter`.
    """

    request_id: str
    prompt_length: int
    tokens: list[int]
    sampling: SamplingParams
    length: int = dataclasses.field(init=False)
    last_length: int = dataclasses.field(init=False)
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    slot: int = -1
    rope_set: int = 0
    last_token_on_device: bool = False
    slot_ready: bool = False
    prompt_reported: int = 1
    pooled: Array | None = None
    constraint: Constraint | None = None
    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    started: float = 0.0
    table: Array = dataclasses.field(default_factory=lambda: _NO_BLOCKS, repr=False)

    def __post_init__(self) -> None:
        self.length = len(self.tokens)
        self.last_length = self.prompt_length + max(1, self.sampling.max_tokens)

    @property
    def generated(self) -> int:
        """Tokens generated so far, those in flight included."""
        return self.length - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache: 1 for a decoding sequence, more while its prompt is prefilled."""
        return self.length - self.computed

    def blocks_missing(self, rows: int) -> int:
        """KV blocks to allocate before `rows` more tokens can be computed."""
        return -(-(self.computed + rows) // KV_BLOCK_SIZE) - len(self.blocks)

    def add_blocks(self, blocks: list[int]) -> None:
        """More blocks, behind those that the sequence has."""
        self.blocks += blocks
        self.table = np.concatenate((self.table, np.array(blocks, np.int32)))

    def take_blocks(self) -> list[int]:
        """All its blocks, which it then has no more."""
        blocks, self.blocks, self.table = self.blocks, [], _NO_BLOCKS
        return blocks

    def prompt_targets(self, rows: int) -> range:
        """Positions of the prompt tokens whose log-probabilities the next `rows` rows have to give."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        # The row at position p says what the model thinks of the token at p + 1.
        begin, end = self.computed + 1, self.computed + rows + 1
        return range(max(begin, self.prompt_reported), min(end, self.prompt_length))

    def logit_rows(self, rows: int) -> int:
        """How many of the next `rows` rows need logits; no row needs them twice."""
        samples = self.computed + rows == self.length
        return samples if self.sampling.prompt_logprobs is None else len(self.prompt_targets(rows)) + samples

    @property
    def masked(self) -> bool:
        """The next token is chosen under a mask that the host delivers: see `sampling_state.token_masks`."""
        if self.constraint is not None and self.constraint.applies(self.generated):
            return True
        return self.generated < self.sampling.min_tokens and bool(self.sampling.stop_token_ids)

    def restart(self) -> None:
        """Compute every token again, into the blocks that the sequence has. None may be in flight."""
        self.computed, self.last_token_on_device = 0, False

    def preempt(self) -> None:
        """Forget what the device held; the tokens stay and are computed again later."""
        self.restart()
        self.slot_ready = False
