"""The engine: requests in, tokens out, one `step` at a time. No sockets, no threads."""

from __future__ import annotations

import logging

import numpy as np

from atlas.engine.kv_cache import BlockPool
from atlas.engine.messages import FinishReason, SamplingParams, SequenceOutput, Stats
from atlas.engine.sampling import check
from atlas.engine.scheduler import Scheduler
from atlas.engine.sequence import Sequence
from atlas.engine.step_builder import fill
from atlas.errors import RequestError
from atlas.runtime.runner import Runner

_log = logging.getLogger(__name__)


class Engine:
    """Serves sequences with one runner. Not thread-safe: its owner calls it from one loop."""

    def __init__(self, runner: Runner) -> None:
        limits = runner.limits
        self.runner = runner
        self.pool = BlockPool(limits.n_blocks)
        max_seqs = min(limits.n_seqs, limits.n_logits)
        self.scheduler = Scheduler(self.pool, limits.n_rows, max_seqs, limits.n_slots)
        self.steps = 0
        self._sequences: dict[str, Sequence] = {}

    @property
    def busy(self) -> bool:
        """Some request is unfinished."""
        return bool(self._sequences)

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        """Queue a request.

        Raises:
            RequestError: an empty prompt, one that leaves no room in the context, an id outside the
                vocabulary, a request id in use, or sampling values outside their range.
        """
        vocab, context = self.runner.config.shape.vocab_size, self.runner.max_context
        if request_id in self._sequences:
            raise RequestError("request_id", f"{request_id!r} is in use")
        if not 1 <= len(prompt) < context:
            raise RequestError(
                "prompt", f"{len(prompt)} tokens", f"1..{context - 1}: the context holds {context} tokens"
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            bad = next(token for token in prompt if not 0 <= token < vocab)
            raise RequestError("prompt", f"token id {bad}", f"0..{vocab - 1}")
        check(sampling, vocab)
        sequence = Sequence(request_id, len(prompt), list(prompt), sampling)
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request; its blocks are free on return. An unknown or finished id is ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def step(self) -> list[SequenceOutput]:
        """Run one step and return what it produced."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        sampling = fill(self.runner.block, chunks)
        self.runner.forward()
        if sampling:
            tokens = self.runner.sample()
        else:
            self.runner.backend.synchronize()  # the device must be done with the block before it is refilled
            tokens = np.zeros(0, np.int32)
        self.steps += 1
        for chunk in chunks:
            chunk.sequence.computed += chunk.rows
        return [self._append(chunk.sequence, int(token)) for chunk, token in zip(sampling, tokens, strict=True)]

    def _append(self, sequence: Sequence, token: int) -> SequenceOutput:
        if not 0 <= token < self.runner.config.shape.vocab_size:  # INVALID_TOKEN
            self._finish(sequence)
            position = len(sequence.tokens)
            error = f"the model's logits at position {position} are not finite numbers; no token can be chosen"
            return SequenceOutput(sequence.request_id, [], "error", error)
        params = sequence.sampling
        if params.max_tokens == 0:
            self._finish(sequence)
            return SequenceOutput(sequence.request_id, [], "length")
        sequence.tokens.append(token)
        sequence.last_token_on_device = True
        reason: FinishReason | None = None
        if token in params.stop_token_ids:
            reason = "stop"
        elif sequence.generated >= params.max_tokens or len(sequence.tokens) >= self.runner.max_context:
            reason = "length"
        if reason:
            self._finish(sequence)
        return SequenceOutput(sequence.request_id, [token], reason)

    def _finish(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self.scheduler.remove(sequence)
        if not self._sequences and self.pool.free != self.pool.total:
            raise AssertionError(f"{self.pool.total - self.pool.free} KV blocks have an owner but no request is left")

    def stats(self) -> Stats:
        """A snapshot between two steps."""
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_blocks=self.pool.free,
            total_blocks=self.pool.total,
            steps=self.steps,
        )
