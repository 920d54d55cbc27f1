"""Messages between the API process and the engine process.

Wire format: a little-endian uint32 length, then one msgpack document (`msgspec`), over a unix
socket in a folder of mode 0700. Every message is a tagged struct; nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

from atlas.config import EngineConfig
from atlas.engine.sampling import SamplingParams as SamplingParams
from atlas.engine.sampling import TokenLogprobs as TokenLogprobs

LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 << 20

FinishReason = Literal["stop", "length", "abort", "error"]


# ---- API process -> engine process -------------------------------------------------------------


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """The first message, and sent once: what to load and how."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Queue one sequence. `prompt` is token ids, 1..max_context-1 of them."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request and free its blocks within a step. An unknown id is ignored."""

    request_id: str


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Ask for one `Stats`."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Abort what runs and exit."""


ToEngine = Configure | Submit | Abort | GetStats | Shutdown


# ---- engine process -> API process -------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """A stage of start-up began."""

    stage: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine serves.

    max_context: longest prompt + generated tokens of one sequence.
    kernel_set, reason: which kernel set runs and why it was chosen.
    ledger: (stage, seconds) in order.
    memory: (owner, bytes), largest first: all that the model takes on the device and for its steps.
    target: the kernel set's hardware, model and quant.
    embedding_size: elements of an embedding; 0: it makes none.
    """

    backend: str
    kernel_set: str
    reason: str
    max_context: int
    vocab_size: int
    ledger: list[tuple[str, float]]
    memory: list[tuple[str, int]] = []
    target: dict[str, str] = {}
    embedding_size: int = 0


class Timing(msgspec.Struct, frozen=True, gc=False):
    """Where a request's time went in the engine, in seconds.

    queued: from its arrival to its first step.  prefill: from then to its first token, with all waits between.
    """

    queued: float
    prefill: float


class SequenceOutput(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """New tokens of one request. After a `finish_reason` nothing more is sent for it.

    error: set with finish_reason "error": one sentence for the client.
    by_grammar: with finish_reason "error": the request's own grammar is to blame.
    logprobs: one for each of `token_ids`, if the request asked.
    prompt_logprobs: those of the prompt's next tokens, if the request asked: they come in order, some in each
        output while the prompt is computed, and all of them before the first token. The prompt's first token
        has none.
    timing: with the first token.
    complete: with finish_reason "stop": the text is complete with the last token, which is part of it; else that token
        is the one that stood for the end.
    embedding: float32 in little-endian order, with the finish reason of a request that asked for pooling.

    Hundreds are made in a step. `gc=False`: they must not make Python's cycle collector run, which now and then looks
    at all objects of the process, while the device waits. Nothing that they hold can refer to them.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    timing: Timing | None = None
    complete: bool = False
    embedding: bytes | None = None
    by_grammar: bool = False

    @staticmethod
    def join(outputs: Sequence[SequenceOutput]) -> SequenceOutput:
        """Successive outputs of one request as one."""
        if len(outputs) == 1:
            return outputs[0]
        return SequenceOutput(
            outputs[0].request_id,
            [token for output in outputs for token in output.token_ids],
            outputs[-1].finish_reason,
            outputs[-1].error,
            tuple(entry for output in outputs for entry in output.logprobs),
            tuple(entry for output in outputs for entry in output.prompt_logprobs),
            next((output.timing for output in outputs if output.timing is not None), None),
            outputs[-1].complete,
            outputs[-1].embedding,
            outputs[-1].by_grammar,
        )


class StepOutput(msgspec.Struct, frozen=True, tag="step_output"):
    """Everything that one step produced."""

    outputs: list[SequenceOutput]


class Work(msgspec.Struct, frozen=True):
    """What an engine's steps came to since it serves.

    rows, sequences: tokens computed, and sequences that had some of them, summed over the steps.
    steps_by_rows, steps_by_sequences: entry i counts the steps that had at most 2^i of them, and more than 2^(i-1).
    schedule, submit, wait, output: seconds. Of deciding and describing steps; of handing them to the backend (on a CPU
        that computes them); of waiting for the device; of what their tokens mean for the requests.
    masks: seconds of making masks, of grammars and others, beside the forward pass where the device works by itself.
    grammar_errors: requests that ended because their grammar could not be followed.
    """

    rows: int = 0
    sequences: int = 0
    steps_by_rows: list[int] = []
    steps_by_sequences: list[int] = []
    schedule: float = 0.0
    submit: float = 0.0
    wait: float = 0.0
    output: float = 0.0
    masks: float = 0.0
    grammar_errors: int = 0


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """A snapshot between two steps; `steps`, `preemptions` and `work` count from the beginning.

    waiting: for a place, or for their grammar to be compiled.
    """

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    steps: int
    preemptions: int = 0
    work: Work = Work()


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot go on (load failed or the step loop broke); the process exits after it."""

    error: str


FromEngine = Loading | Ready | StepOutput | Stats | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One message as bytes on the wire, length prefix included."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_to_engine(body: bytes) -> ToEngine:
    """A message of the API process. Raises msgspec.ValidationError on anything else."""
    return _to_engine.decode(body)


def decode_from_engine(body: bytes | memoryview) -> FromEngine:
    """A message of the engine process. Raises msgspec.ValidationError on anything else."""
    return _from_engine.decode(body)
