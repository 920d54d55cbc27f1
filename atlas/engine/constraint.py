"""What the next token of one sequence may be, as far as that follows from the tokens before it: the budget of its
thinking, and its grammar. And the masks of a step's rows."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from atlas.engine.sampling import SamplingParams
from atlas.runtime.backend import Array

if TYPE_CHECKING:
    import llguidance

_MASK_SECONDS, _USUAL = 0.15, 0.003
"""Processor time that the masks of one sequence may take, as far as each takes more than is usual: a schema's, of
hundreds of members too, takes 2 ms at most and mostly a hundredth of that. Only an ambiguous grammar, which has ever
more ways to read its text, takes more, and all other sequences of a step wait for it."""
_SLOW, _SLOW_ROW = 0.01, 0.00025
"""Seconds, and for each row, after which the rows of the next step are timed one by one."""


class TokenConstraint(Protocol):
    """A constraint that moves along with tokens, as whoever proposes tokens (speculation) needs it.

    Drafts are checked by `accept`, which stops at the first one that is not allowed; those that verification rejects
    are taken back by `rollback`. `forced` may be proposed without asking a model.
    """

    def allowed(self, row: Array) -> None:
        """Write the mask of the next token: uint32 [ceil(vocab / 32)], bit v % 32 of word v // 32."""

    def accept(self, tokens: List[int]) -> int:
        """Move on by the leading tokens that are allowed. Returns how many these are."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""

    def forced(self) -> list[int]:
        """Tokens that must come next: the only ones that are allowed, one after the other. May be fewer than are."""


class Constraint:
    """The constraint of one sequence. It has seen the tokens that `accept` was given.

    matcher: of the sequence's grammar, at its beginning; None: it has none.
    end: the tokenizer's end token, which a matcher allows where its text may end. None if that token has a text.
    known: tokens of the tokenizer; a model may have more.
    lexer: number of the matcher's lexer: those of one number wait for each other.
    renew: another matcher at the beginning, and its lexer's number; None: there is none. Those that share a lexer share
        how many states that may have: who finds none left, through no fault of its own, goes on with another, once.
    finished: the grammar's text is complete, and nothing may follow.
    fault: why the sequence cannot go on: the grammar ran into a limit, or no token of the vocabulary goes on with it.
    """

    def __init__(
        self,
        params: SamplingParams,
        matcher: llguidance.LLMatcher | None = None,
        end: int | None = None,
        known: int = 0,
        lexer: int = 0,
        renew: Callable[[], tuple[llguidance.LLMatcher, int] | None] = lambda: None,
    ) -> None:
        thinking = params.thinking
        self._matcher, self._end_token, self._known, self.lexer = matcher, end, known, lexer
        self._renew, self._has_renewed = renew, False
        self._stops = params.stop_token_ids
        self._begin = thinking.begin if thinking else ()
        self._end = thinking.end if thinking else ()
        self._budget = thinking.budget if thinking else None
        self._tokens: list[int] = []
        # Where thinking begins and where it has ended, in `_tokens`; None: it has not.
        self._opened = 0 if thinking and thinking.inside else None
        self._closed = 0 if thinking is None or not (thinking.inside or thinking.begin) else None
        self._at_first = (self._opened, self._closed)
        self._stopped = False  # the last token is a stop token, of which the matcher knows nothing
        self._charged = 0.0
        self.finished = False
        self.fault = ""

    # ---- what a step asks ----------------------------------------------------------------------

    def applies(self, generated: int) -> bool:
        """Whether the token after `generated` ones, of which the last may be unknown yet, has a mask."""
        if self._matcher is not None:
            return True
        return self._budget is not None and self._closed is None and generated - (self._opened or 0) >= self._budget

    def matcher_for(self, row: Array) -> llguidance.LLMatcher | None:
        """The matcher that has to fill `row`, whose mask `complete` then finishes; None: `row` is written."""
        forced = self._marker()
        if forced is not None:
            row[:] = 0
            _set(row, (forced,))
            return None
        if self._matcher is None or (self._closed is None and (self._opened is not None or self._tokens)):
            row[:] = 0xFFFFFFFF
            if self._matcher is not None:
                _clear(row, self._stops)  # a grammar is not left by ending inside thinking
            return None
        return self._matcher

    def complete(self, row: Array) -> None:
        """Finish a mask that the matcher has filled: what ends the text is the sequence's own stop tokens."""
        assert self._matcher is not None
        if self._matcher.is_error() and self._renewed():
            _place(np.frombuffer(self._matcher.compute_bitmask(), np.uint32), row)
        matcher = self._matcher
        if matcher.is_error():
            self.fault = self.fault or _fault(matcher)
        accepting = matcher.is_accepting()
        if accepting and self._end_token is not None:
            _clear(row, (self._end_token,))
        if accepting:
            _set(row, self._stops)
        if self._closed is None and self._begin:
            _set(row, self._begin[:1])
        if not row.any():
            if accepting:
                self.finished = True
            elif not self.fault:
                self.fault = "no token of the vocabulary goes on with its text"
        if self.finished or self.fault:
            row[:] = 0xFFFFFFFF  # whatever is sampled is dropped

    def charge(self, seconds: float) -> None:
        """Its mask has taken so much processor time."""
        self._charged += max(0.0, seconds - _USUAL)
        if self._charged > _MASK_SECONDS:
            took = f"the last token's choices took {seconds * 1000:.0f} ms to find"
            self.fault = f"it is too ambiguous, {took}; accepted: a grammar with few ways to read a text"

    # ---- TokenConstraint -----------------------------------------------------------------------

    def allowed(self, row: Array) -> None:
        """See `TokenConstraint`."""
        matcher = self.matcher_for(row)
        if matcher is not None:
            words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            _place(words, row)
            self.complete(row)

    def accept(self, tokens: List[int]) -> int:
        """See `TokenConstraint`."""
        for count, token in enumerate(tokens):
            if not self._take(token):
                return count
        return len(tokens)

    def rollback(self, count: int) -> None:
        """See `TokenConstraint`."""
        left = len(self._tokens) - count
        if self._matcher is not None and self._closed is not None and count:
            self._matcher.rollback(min(count, len(self._tokens) - self._closed) - self._stopped)
        self._stopped = self._stopped and not count
        self.finished = self.finished and not count
        del self._tokens[left:]
        if left == 0:
            self._opened, self._closed = self._at_first
        if self._closed is not None and self._closed > left:
            self._closed = None
        if self._opened is not None and self._opened > left:
            self._opened = None

    def forced(self) -> list[int]:
        """See `TokenConstraint`."""
        if (token := self._marker()) is not None:
            return [token]
        if self._matcher is None or self._closed is None:
            return []
        return self._matcher.compute_ff_tokens()

    # ---- thinking ------------------------------------------------------------------------------

    def _marker(self) -> int | None:
        """The token of a marker that must come next: the end once the budget is spent, or the rest of a begun one."""
        if self._closed is not None:
            return None
        if self._opened is None:
            # Only with a grammar is the beginning of a marker no text.
            return self._begin[len(self._tokens)] if self._matcher is not None and self._tokens else None
        inside = len(self._tokens) - self._opened
        if self._budget is None or inside < self._budget:
            return None
        return self._end[_overlap(self._last(min(inside, len(self._end) - 1)), self._end)]

    def _last(self, count: int) -> list[int]:
        return self._tokens[len(self._tokens) - count :]

    def _take(self, token: int) -> bool:
        forced = self._marker()
        if forced is not None and token != forced:
            return False
        if self._matcher is not None and self._closed is None and forced is None and token in self._stops:
            return False
        if self._closed is not None:
            if self._matcher is not None and not self._match(token):
                return False
        elif self._opened is None:
            if self._matcher is not None and not self._tokens and token != self._begin[0]:
                if not self._match(token):
                    return False
                self._closed = 0
            elif (*self._last(min(len(self._tokens), len(self._begin) - 1)), token) == self._begin:
                self._opened = len(self._tokens) + 1
        else:
            inside = len(self._tokens) - self._opened
            if (*self._last(min(inside, len(self._end) - 1)), token) == self._end:
                self._closed = len(self._tokens) + 1
        self._tokens.append(token)
        return True

    def _match(self, token: int) -> bool:
        assert self._matcher is not None
        if self.finished:
            return False
        if token in self._stops and self._matcher.is_accepting():
            self.finished = self._stopped = True
            return True
        if token >= self._known:  # which would break the matcher
            return False
        if self._matcher.try_consume_tokens([token]) != 1:
            if not self._matcher.is_error():  # it is only forbidden
                return False
            if not (self._renewed() and self._matcher.try_consume_tokens([token]) == 1):
                self.fault = _fault(self._matcher)
                return False
        self.finished = self._matcher.is_stopped()
        return True

    def _renewed(self) -> bool:
        """Whether the matcher is now another one, at the same place."""
        assert self._matcher is not None
        if self._has_renewed or "lexer error" not in self._matcher.get_error():
            return False
        self._has_renewed = True
        if (other := self._renew()) is None:
            return False
        self._matcher, self.lexer = other
        tokens = [] if self._closed is None else self._tokens[self._closed :]
        return self._matcher.try_consume_tokens(tokens) == len(tokens)


def _fault(matcher: llguidance.LLMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


class Masks:
    """Fills the masks of a step. The work of several matchers is spread over threads, without the interpreter lock."""

    def __init__(self) -> None:
        self._executor: llguidance.LLExecutor | None = None
        self._slow = False  # the last time

    def fill(self, rows: Array, constraints: List[Constraint | None], vocab: int) -> None:
        """Write the mask of each row: uint32 [len(constraints), ceil(vocab / 32)]. Rows without a constraint are left.

        vocab: tokens that the matchers' tokenizer has.
        """
        matching: list[tuple[llguidance.LLMatcher, int]] = []
        # Neighbours go to one thread: those that share a lexer would make others wait.
        for index in sorted(range(len(rows)), key=lambda i: 0 if (c := constraints[i]) is None else c.lexer):
            constraint = constraints[index]
            matcher = constraint.matcher_for(rows[index]) if constraint is not None else None
            if matcher is not None:
                matching.append((matcher, index))
        if not matching:
            return
        width = -(-vocab // 32)
        words = rows if rows.shape[1] == width else np.empty((len(constraints), width), np.uint32)
        began = perf_counter()
        if len(matching) == 1 or self._slow:
            for matcher, index in matching:
                used = thread_time()  # and not the clock: others may have the processor
                matcher.unsafe_compute_mask_ptr(words[index].ctypes.data, words[index].nbytes)
                constraint = constraints[index]
                assert constraint is not None
                constraint.charge(thread_time() - used)
        else:
            if self._executor is None:
                import llguidance

                self._executor = llguidance.LLExecutor()
            self._executor.unsafe_compute_mask_ptr(matching, words.ctypes.data, words[0].nbytes, len(words))
        self._slow = perf_counter() - began > _SLOW + _SLOW_ROW * len(matching)
        for _, index in matching:
            constraint = constraints[index]
            assert constraint is not None
            if words is not rows:
                _place(words[index], rows[index])
            constraint.complete(rows[index])


def _place(words: Array, row: Array) -> None:
    """A mask of the tokenizer's vocabulary as one of the model's, which may be larger or smaller."""
    row[: len(words)] = words[: len(row)]
    row[len(words) :] = 0


def _set(row: Array, tokens: List[int]) -> None:
    for token in tokens:
        row[token >> 5] |= np.uint32(1 << (token & 31))


def _clear(row: Array, tokens: List[int]) -> None:
    for token in tokens:
        row[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


def _overlap(tokens: List[int], marker: tuple[int, ...]) -> int:
    """How many of the marker's first tokens, not all of them, are the last of `tokens`."""
    for count in range(min(len(marker) - 1, len(tokens)), 0, -1):
        if tuple(tokens[-count:]) == marker[:count]:
            return count
    return 0
