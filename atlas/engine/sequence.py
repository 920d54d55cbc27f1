"""One sequence: its tokens, and how far the device has come with them."""

from __future__ import annotations

import dataclasses

from atlas.engine.messages import SamplingParams
from atlas.targets.shape import KV_BLOCK_SIZE


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request while it is in the engine.

    tokens: prompt, then generated tokens; the only record of both.
    computed: leading tokens whose K and V are in the cache. One source of truth: every position that
        a step uses is derived from it.
    blocks: KV blocks in order; empty while waiting.  slot: its row of per-slot state, -1 while waiting.
    last_token_on_device: the last token was sampled into the slot by the previous step.
    """

    request_id: str
    prompt_length: int
    tokens: list[int]
    sampling: SamplingParams
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    slot: int = -1
    last_token_on_device: bool = False

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache: 1 for a decoding sequence, more while its prompt is prefilled."""
        return len(self.tokens) - self.computed

    def blocks_missing(self, rows: int) -> int:
        """KV blocks to allocate before `rows` more tokens can be computed."""
        return -(-(self.computed + rows) // KV_BLOCK_SIZE) - len(self.blocks)

    def preempt(self) -> None:
        """Forget what the device holds; the tokens stay and are computed again later."""
        self.computed, self.blocks, self.slot, self.last_token_on_device = 0, [], -1, False
