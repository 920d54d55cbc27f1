"""The engine: requests in, tokens out, one `step` at a time. No sockets, no threads."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from atlas.engine.compilations import Compilations
from atlas.engine.constraint import Constraint, Masks
from atlas.engine.grammar import Compiler
from atlas.engine.kv_cache import BlockPool
from atlas.engine.messages import FinishReason, SamplingParams, SequenceOutput, Stats, Timing, TokenLogprobs
from atlas.engine.sampling import check
from atlas.engine.sampling_state import bias_row, count_row, token_masks
from atlas.engine.scheduler import Plan, Scheduler
from atlas.engine.sequence import Sequence
from atlas.engine.step_builder import LogitRows, SlotParameters, fill
from atlas.engine.work import WorkCount
from atlas.errors import AtlasError, RequestError
from atlas.runtime.backend import Array
from atlas.runtime.flight import InFlight
from atlas.runtime.runner import Logprobs, Runner

_log = logging.getLogger(__name__)

_COMPILE_WAIT = 0.005
"""Seconds for which a step that has nothing else to do waits for a grammar."""


@dataclasses.dataclass(frozen=True)
class _Step:
    """A submitted step and the logit rows whose results it will bring."""

    in_flight: InFlight
    rows: LogitRows


class Engine:
    """Serves sequences with one runner. Not thread-safe: its owner calls it from one loop.

    Where the runner can work ahead (`Runner.ahead`), a step is submitted before the tokens of the one before it
    are known: they reach it on the device. So a sequence that a stop token ends has one row computed in vain. Where a
    row's mask depends on them, its step is submitted in halves: the host learns the tokens and makes the mask while the
    device runs the forward program, and steps without such a row are as if there were none.
    """

    def __init__(self, runner: Runner, compiler: Compiler | None = None) -> None:
        """compiler: of grammars for this model's tokenizer; None: requests with a grammar are refused."""
        limits = runner.limits
        self.runner = runner
        self.pool = BlockPool(limits.n_blocks)
        # Each running sequence has a row in every decode step: none waits for those before it to end.
        max_seqs = min(limits.n_seqs, limits.n_logits, runner.decode_rows or limits.n_seqs)
        self.scheduler = Scheduler(
            self.pool,
            limits.n_rows,
            max_seqs,
            limits.n_slots,
            limits.n_logits,
            runner.config.rope_set if runner.config.rope_switch else None,
            runner.max_context,
            runner.decode_rows,
        )
        self._slots = SlotParameters(limits.n_slots)
        self.steps = 0
        self._work = WorkCount()
        self._sequences: dict[str, Sequence] = {}
        self._submitted: deque[_Step] = deque()
        self._compiler, self._masks = compiler, Masks()
        self._compilations = Compilations(self._constraint)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="atlas-masks")

    @property
    def busy(self) -> bool:
        """Some request is unfinished, or the device is."""
        return bool(self._sequences or self._submitted)

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
        if sampling.pooling is not None and self.runner.hidden is None:
            raise RequestError("pooling", sampling.pooling, "nothing: this backend makes no embeddings")
        if sampling.grammar is not None and self._compiler is None:
            raise RequestError("grammar", "given", "nothing: this model has no tokenizer that it could be compiled for")
        sequence = Sequence(request_id, len(prompt), list(prompt), sampling)
        self._sequences[request_id] = sequence
        if sampling.grammar is not None:
            self._compilations.add(sequence)
            return
        if sampling.thinking is not None and sampling.thinking.budget is not None:
            sequence.constraint = Constraint(sampling)
        self.scheduler.add(sequence)

    def _constraint(self, sequence: Sequence) -> Constraint:
        compiler, grammar = self._compiler, sequence.sampling.grammar
        assert compiler is not None and grammar is not None
        matcher, lexer = compiler.lease(grammar, sequence)
        user = weakref.ref(sequence)  # which holds the constraint: a lexer is free when it goes
        return Constraint(
            sequence.sampling,
            matcher,
            compiler.end,
            compiler.tokenizer.vocab_size,
            lexer,
            lambda: compiler.renew(grammar, user()),
        )

    def abort(self, request_id: str) -> None:
        """Drop a request; its blocks are free on return. An unknown or finished id is ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if not self._compilations.drop(sequence):
            self.scheduler.remove(sequence)

    def step(self) -> list[SequenceOutput]:
        """Submit the next step, if there is one, and return what the oldest one produced once enough are in flight."""
        outputs = self._compiled() if self._compilations else []
        began = perf_counter()
        plan = self.scheduler.schedule(drained=not self._submitted)
        if plan is not None and plan.chunks:
            outputs += self._submit(plan, began)
            if len(self._submitted) <= self.runner.ahead:
                return outputs
        if self._submitted:
            return outputs + self._collect()
        if self._compilations and not outputs:
            self._compilations.wait(_COMPILE_WAIT)
        return outputs

    def _compiled(self) -> list[SequenceOutput]:
        """Queue the sequences whose grammars are compiled; those whose cannot be end."""
        outputs = []
        for sequence, result in self._compilations.collect():
            if isinstance(result, Constraint):
                sequence.constraint = result
                self.scheduler.add(sequence)
                continue
            error, by_grammar = str(result), isinstance(result, RequestError)
            if not isinstance(result, AtlasError):  # the library gave up, or ran out of memory
                _log.error("a grammar could not be compiled", exc_info=result)
                error = f"the grammar could not be compiled ({type(result).__name__})"
            del self._sequences[sequence.request_id]
            self._work.grammar_errors += by_grammar
            outputs.append(SequenceOutput(sequence.request_id, [], "error", error, by_grammar=by_grammar))
        return outputs

    def _submit(self, plan: Plan, began: float) -> list[SequenceOutput]:
        """Submit a step. Returns what earlier ones produced, if its masks have to wait for that."""
        for chunk in plan.chunks:
            if not chunk.sequence.slot_ready:
                self._prepare_slot(chunk.sequence)
        rows = fill(self.runner.block, plan.chunks, self._slots, plan.phase)
        late = [sequence for sequence, _ in rows.masked if sequence.constraint is not None]
        masks = self._mask_rows(rows) if rows.masked and not late else ()
        n_rows = 0
        for chunk in plan.chunks:
            sequence, samples = chunk.sequence, chunk.samples
            n_rows += chunk.rows
            sequence.computed += chunk.rows
            if samples:
                sequence.length += 1
                sequence.last_token_on_device = True
        outputs: list[SequenceOutput] = []
        filled, elsewhere = perf_counter(), 0.0
        if not late:
            in_flight = self.runner.submit(masks, rows.logprobs, rows.pooled)
        else:
            known = all(sequence.length == len(sequence.tokens) + 1 for sequence in late)
            made = self._beside.submit(self._mask_rows, rows) if known else None
            self.runner.begin(rows.pooled)
            begun = perf_counter()
            while self._submitted and not known:
                outputs += self._collect()
            masks = self._mask_rows(rows) if made is None else made.result()
            elsewhere = perf_counter() - begun
            in_flight = self.runner.end(masks, rows.logprobs)
        submitted = perf_counter()
        self._submitted.append(_Step(in_flight, rows))
        self.steps += 1
        self._work.submitted(n_rows, len(plan.chunks), submitted - filled - elsewhere)
        self._work.schedule += filled - began
        return outputs

    def _mask_rows(self, rows: LogitRows) -> Array:
        """The masks of a step, all of whose sequences' tokens are known."""
        vocab = 0 if self._compiler is None or not self._compiler.ready else self._compiler.tokenizer.vocab_size
        began = perf_counter()
        masks = token_masks(rows.masked, self.runner.config.shape.vocab_size, self._masks, vocab)
        self._work.masks += perf_counter() - began
        return masks

    def _collect(self) -> list[SequenceOutput]:
        """Wait for the oldest step. What it brings to a request that has ended meanwhile is dropped."""
        step = self._submitted.popleft()
        began = perf_counter()
        tokens, logprobs = self.runner.collect(step.in_flight)
        hidden = self.runner.hidden_rows(step.in_flight) if step.rows.pooled and step.in_flight.rows else None
        collected = perf_counter()
        outputs: list[SequenceOutput] = []
        prompt: list[TokenLogprobs] = []  # of the sequence whose rows these are
        sequences, targets, vocab = step.rows.sequences, step.rows.targets, self.runner.config.shape.vocab_size
        for i, (sequence, token) in enumerate(zip(sequences, tokens.tolist(), strict=True)):
            if self._sequences.get(sequence.request_id) is not sequence:
                continue
            target = targets.get(i)
            report = _report(logprobs, i, sequence, token, target) if logprobs is not None else None
            if target is None and sequence.constraint is not None and sequence.constraint.fault:
                outputs.append(self._fail(sequence, sequence.constraint.fault, by_grammar=True))
            elif not 0 <= token < vocab:  # INVALID_TOKEN
                position = len(sequence.tokens) if target is None else target
                error = f"the model's logits at position {position} are not finite numbers; no token can be chosen"
                outputs.append(self._fail(sequence, error))
            elif sequence.sampling.pooling is not None:
                assert hidden is not None
                outputs += self._pool(sequence, hidden[i], target)
            elif target is None:
                outputs.append(self._append(sequence, token, () if report is None else (report,), tuple(prompt)))
            else:
                assert report is not None
                prompt.append(report)
                sequence.prompt_reported = target + 1
                if sequence in sequences[i + 1 : i + 2]:
                    continue
                outputs.append(SequenceOutput(sequence.request_id, [], prompt_logprobs=tuple(prompt)))
            prompt.clear()
        self._work.wait += collected - began
        self._work.output += perf_counter() - collected
        return outputs

    def _prepare_slot(self, sequence: Sequence) -> None:
        """Write the per-slot state of a sequence that has just been given a slot."""
        vocab = self.runner.config.shape.vocab_size
        self._slots.write(sequence.slot, sequence.sampling)
        if sequence.sampling.logit_bias:
            self.runner.write_slot("logit_bias", sequence.slot, bias_row(sequence.sampling, vocab))
        if sequence.sampling.penalises:
            self.runner.write_slot("token_count", sequence.slot, count_row(sequence, vocab))
        sequence.slot_ready = True
        sequence.started = sequence.started or perf_counter()

    def _fail(self, sequence: Sequence, error: str, *, by_grammar: bool = False) -> SequenceOutput:
        """End a sequence that cannot go on. by_grammar: what is wrong is that of the request."""
        self._finish(sequence)
        if by_grammar and (grammar := sequence.sampling.grammar) is not None:
            self._work.grammar_errors += 1
            assert self._compiler is not None
            self._compiler.forget(grammar)
            begin = " ".join(grammar.text.split())
            named = grammar.syntax + f" {begin[:60]}{'...' * (len(begin) > 60)}" * bool(begin)
            error = f"the grammar ({named}) cannot be followed: {error}"
        return SequenceOutput(sequence.request_id, [], "error", error, by_grammar=by_grammar)

    def _append(
        self,
        sequence: Sequence,
        token: int,
        logprobs: tuple[TokenLogprobs, ...],
        prompt: tuple[TokenLogprobs, ...],
    ) -> SequenceOutput:
        """What a sampled token means for its sequence."""
        params = sequence.sampling
        timing = _timing(sequence) if len(sequence.tokens) == sequence.prompt_length else None
        if params.max_tokens == 0:
            self._finish(sequence)
            return SequenceOutput(sequence.request_id, [], "length", prompt_logprobs=prompt, timing=timing)
        constraint = sequence.constraint
        if constraint is not None and constraint.finished:  # before this token, which only stood for the end
            self._finish(sequence)
            return SequenceOutput(sequence.request_id, [], "stop", prompt_logprobs=prompt, timing=timing, complete=True)
        sequence.tokens.append(token)
        reason: FinishReason | None = None
        complete = False
        if token in params.stop_token_ids:
            reason = "stop"
        elif constraint is not None and constraint.accept((token,)) == 0:
            error = constraint.fault or f"token {token} was chosen although its mask forbids it"
            return self._fail(sequence, error, by_grammar=bool(constraint.fault))
        elif constraint is not None and constraint.finished:
            reason, complete = "stop", True
        elif (
            len(sequence.tokens) - sequence.prompt_length >= params.max_tokens
            or len(sequence.tokens) >= self.runner.max_context
        ):
            reason = "length"
        if reason:
            self._finish(sequence)
        return SequenceOutput(sequence.request_id, [token], reason, None, logprobs, prompt, timing, complete)

    def _pool(self, sequence: Sequence, row: Array, target: int | None) -> list[SequenceOutput]:
        """Put a row to its sequence's embedding, and say it if it is the last."""
        sequence.pooled = row if sequence.pooled is None else sequence.pooled + row
        if target is not None:
            sequence.prompt_reported = target + 1
            return []
        self._finish(sequence)
        rows = sequence.prompt_length if sequence.sampling.pooling == "mean" else 1
        vector = (sequence.pooled / rows).astype("<f4").tobytes()
        return [SequenceOutput(sequence.request_id, [], "length", timing=_timing(sequence), embedding=vector)]

    def _finish(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self.scheduler.remove(sequence)
        if not self._sequences and self.pool.free != self.pool.total:
            raise AssertionError(f"{self.pool.total - self.pool.free} KV blocks have an owner but no request is left")

    def stats(self) -> Stats:
        """A snapshot between two steps."""
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._compilations),
            free_blocks=self.pool.free,
            total_blocks=self.pool.total,
            steps=self.steps,
            preemptions=self.scheduler.preemptions,
            work=self._work.so_far(),
        )


def _timing(sequence: Sequence) -> Timing:
    """Of a sequence whose first token has just come."""
    return Timing(sequence.started - sequence.arrived, perf_counter() - sequence.started)


def _report(logprobs: Logprobs, i: int, sequence: Sequence, sampled: int, target: int | None) -> TokenLogprobs | None:
    """Row `i` of a step's log-probabilities, as the request asked for it."""
    n_top = sequence.sampling.logprobs if target is None else sequence.sampling.prompt_logprobs
    if n_top is None:
        return None
    return TokenLogprobs(
        sampled if target is None else sequence.tokens[target],
        float(logprobs.logprob[i]),
        int(logprobs.rank[i]),
        logprobs.top_token[i, :n_top].tolist(),
        logprobs.top_logprob[i, :n_top].tolist(),
    )
