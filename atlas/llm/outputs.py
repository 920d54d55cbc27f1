"""What `LLM.generate` and `LLM.chat` return."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """What the model thought of one token.

    logprob: natural logarithm of its probability by the raw logits.  rank: 1 for the most likely token.
    decoded_token: its text; U+FFFD for a part of a character.
    """

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob: the chosen token, and the most likely ones that were asked for."""


@dataclasses.dataclass
class CompletionOutput:
    """One continuation of a prompt.

    index: 0..n-1.  text: without end token or stop string.
    token_ids: all generated ids; an end token counts, tokens of a stop string do up to the one that completes it.
    finish_reason: "stop" for an end token or stop string, "length" for max_tokens or the end of the context.
    logprobs: of each token, where asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens; None where log-probabilities were not asked for."""
        if self.logprobs is None:
            return None
        return math.fsum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


@dataclasses.dataclass
class RequestMetrics:
    """When things happened, in seconds of `time.perf_counter()`.

    submitted: the call handed the prompt over.  first_token, finished: over all continuations.
    """

    submitted: float
    first_token: float = math.nan
    finished: float = math.nan

    @property
    def time_to_first_token(self) -> float:
        """Seconds from submission, waiting included."""
        return self.first_token - self.submitted

    @property
    def seconds(self) -> float:
        """Seconds from submission to the end."""
        return self.finished - self.submitted


@dataclasses.dataclass
class RequestOutput:
    """One prompt with its continuations.

    prompt: the text, a conversation as the template rendered it; None when ids were given.
    outputs: one for each of `n`.
    prompt_logprobs: of each prompt token, None for the first; None as a whole where not asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclasses.dataclass(frozen=True)
class StreamOutput:
    """What is new in one continuation.

    prompt_index: place of the prompt in the call.  index: which of its `n` continuations.
    text: whole characters only; a part of a stop string is held back until it is known to be none.
    token_ids, logprobs, prompt_logprobs: the new ones (text may come later than its tokens).
    finish_reason: set in the last one.  time: `time.perf_counter()` when the tokens were there.

    Texts and tokens joined are those of the answer that is not streamed.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs]
    time: float
