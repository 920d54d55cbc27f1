"""One sequence: its tokens, and how far the device has come with them."""

from __future__ import annotations

import dataclasses

import numpy as np

from atlas.engine.messages import SamplingParams
from atlas.runtime.backend import Array
from atlas.targets.shape import KV_BLOCK_SIZE


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request while it is in the engine.

    tokens: prompt, then generated tokens; the only record of both.
    in_flight: tokens that submitted steps sample after them and the host has not seen.
    computed: leading tokens whose K and V are in the cache once the submitted steps have run. One source of
        truth: every position that a step uses is derived from it.
    blocks: KV blocks in order; empty while waiting.  slot: its row of per-slot state, -1 while waiting.
    rope_set: the RoPE frequencies that the cached keys were turned by. A function of the sequence's length
        (ModelConfig.rope_set); the scheduler keeps it.
    last_token_on_device: the last token is, or will be, sampled into the slot by the previous step.
    slot_ready: the slot holds this sequence's bias and token counts (where it uses them).
    prompt_reported: leading prompt tokens whose log-probabilities need not be sent: they were, or nobody can
        say (the first). A sequence that is computed again after a preemption reports nothing twice.
    """

    request_id: str
    prompt_length: int
    tokens: list[int]
    sampling: SamplingParams
    in_flight: int = 0
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    slot: int = -1
    rope_set: int = 0
    last_token_on_device: bool = False
    slot_ready: bool = False
    prompt_reported: int = 1
    _table: tuple[list[int], Array] | None = dataclasses.field(default=None, repr=False)

    @property
    def length(self) -> int:
        """Tokens, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def generated(self) -> int:
        """Tokens generated so far, those in flight included."""
        return self.length - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache: 1 for a decoding sequence, more while its prompt is prefilled."""
        return self.length - self.computed

    @property
    def complete(self) -> bool:
        """All the tokens that were asked for are generated or in flight. Stop tokens end a sequence earlier."""
        return self.generated >= max(1, self.sampling.max_tokens)

    def blocks_missing(self, rows: int) -> int:
        """KV blocks to allocate before `rows` more tokens can be computed."""
        return -(-(self.computed + rows) // KV_BLOCK_SIZE) - len(self.blocks)

    def block_table(self) -> Array:
        """`blocks` as an int32 array, made anew only when they have changed."""
        if self._table is None or self._table[0] is not self.blocks or len(self._table[1]) != len(self.blocks):
            self._table = (self.blocks, np.array(self.blocks, np.int32))
        return self._table[1]

    def prompt_targets(self, rows: int) -> range:
        """Positions of the prompt tokens whose log-probabilities the next `rows` rows have to give."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        # The row at position p says what the model thinks of the token at p + 1.
        begin, end = self.computed + 1, self.computed + rows + 1
        return range(max(begin, self.prompt_reported), min(end, self.prompt_length))

    def logit_rows(self, rows: int) -> int:
        """How many of the next `rows` rows need logits; no row needs them twice."""
        return len(self.prompt_targets(rows)) + (self.computed + rows == self.length)

    @property
    def masked(self) -> bool:
        """The next token is chosen under a mask that the host delivers: see `sampling_state.token_mask`."""
        return self.generated < self.sampling.min_tokens and bool(self.sampling.stop_token_ids)

    def restart(self) -> None:
        """Compute every token again, into the blocks that the sequence has. None may be in flight."""
        self.computed, self.last_token_on_device = 0, False

    def preempt(self) -> None:
        """Forget what the device holds; the tokens stay and are computed again later."""
        self.restart()
        self.blocks, self.slot, self.slot_ready = [], -1, False
