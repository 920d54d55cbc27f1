"""`atlas.SamplingParams`: every sampling parameter under the name that the field uses, checked when it is made."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from atlas.engine import sampling as engine
from atlas.engine.sampling_defaults import SamplingDefaults
from atlas.errors import RequestError
from atlas.llm.structured import grammar_of

_ANY_VOCABULARY = 1 << 31


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt is continued. The order of processing stands in atlas/engine/sampling.py.

    n: continuations of each prompt, drawn independently.
    max_tokens: upper bound on generated tokens; None: all that the context holds.
    min_tokens: before so many, neither an end token nor one of `stop_token_ids` is chosen, and no stop string counts.
    temperature: 0 takes the most likely token.  top_k: 0 or -1 keeps all tokens.  top_p, min_p: see there.
    repetition_penalty: 1 is none.  presence_penalty, frequency_penalty: -2..2, 0 is none.
    logit_bias: token id -> -100..100, added to its logit.
    stop: text, or texts, before which the continuation ends.  stop_token_ids: the same by token.
    include_stop_str_in_output: keep in the text what ended it: the stop string, or the text that a stop token has.
    ignore_eos: go on after the model's own end tokens.
    logprobs, prompt_logprobs: report the log-probability of each token, and of so many most likely ones (0..20).
    seed: the same seed gives the same text whatever else runs; None: a random one for each prompt.
    structured_outputs: what the continuation must be: {"json": schema}, {"regex": ...}, {"choice": [...]},
        {"grammar": ...} or {"json_object": True}; a schema may be a pydantic model.

    Raises:
        RequestError: a value of the wrong type or out of range; it names the field.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(
            self, "structured_outputs", grammar_of(self.structured_outputs, "structured_outputs")
        )
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name, kind in _types().items():
            msgspec.structs.force_setattr(self, name, _convert(name, getattr(self, name), kind))
        if not 1 <= self.n <= engine.MAX_CHOICES:
            raise RequestError("n", str(self.n), f"an integer from 1 to {engine.MAX_CHOICES}")
        if self.top_k == -1:
            msgspec.structs.force_setattr(self, "top_k", 0)
        if not all(self.stop):
            raise RequestError("stop", "an empty string", "strings of at least one character")
        tokens = _ANY_VOCABULARY if self.max_tokens is None else self.max_tokens
        engine.check(self._to_engine(tokens, self.min_tokens, self.seed or 0), _ANY_VOCABULARY)

    @classmethod
    def of_model(cls, defaults: SamplingDefaults) -> SamplingParams:
        """What the model's makers recommend (docs/defaults.md), until the context is full."""
        return cls(
            max_tokens=None,
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            presence_penalty=defaults.presence_penalty,
            frequency_penalty=defaults.frequency_penalty,
        )

    def choices(self, room: int, ends: Sequence[int], vocab_size: int) -> list[engine.SamplingParams]:
        """The engine's parameters of each of the `n` continuations.

        room: tokens that the context has left after the prompt; max_tokens is cut to it.
        ends: the model's own end tokens.

        Raises:
            RequestError: a token id outside the vocabulary, or nothing left to choose from.
        """
        tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        seed = secrets.randbits(63) if self.seed is None else self.seed
        first = self._to_engine(tokens, min(self.min_tokens, tokens), seed)
        first = engine.for_model(first, () if self.ignore_eos else ends, vocab_size)
        return [
            msgspec.structs.replace(
                first,
                seed=engine.choice_seed(seed, index),
                # Of the same prompt for every choice; they are told once.
                prompt_logprobs=self.prompt_logprobs if index == 0 else None,
            )
            for index in range(self.n)
        ]

    def _to_engine(self, max_tokens: int, min_tokens: int, seed: int) -> engine.SamplingParams:
        return engine.SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),  # the caller's own may change while the request waits
            seed=seed,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=self.structured_outputs,
        )


def for_each(prompts: int, sampling: Any) -> list[SamplingParams]:
    """One for each prompt: the same, or a list. Raises RequestError."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * prompts
    if not isinstance(sampling, Iterable) or isinstance(sampling, str | Mapping):
        raise RequestError("sampling_params", f"a {type(sampling).__name__}", "SamplingParams, or one for each prompt")
    params = list(sampling)
    for index, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params[{index}]", f"a {type(one).__name__}", "SamplingParams")
    if len(params) != prompts:
        raise RequestError("sampling_params", f"{len(params)} for {prompts} prompts", "one, or one for each")
    return params


_TYPES: dict[str, Any] = {}


def _types() -> dict[str, Any]:
    if not _TYPES:
        _TYPES.update(get_type_hints(SamplingParams))
    return _TYPES


def _convert(name: str, value: Any, kind: Any) -> Any:
    """A value as the field's type; NumPy scalars and, as in the API, string keys of `logit_bias` are taken."""
    value = _python(value)
    try:
        if name == "logit_bias" and isinstance(value, Mapping | None):
            return engine.token_biases(value or {})
        if name in ("stop", "stop_token_ids"):
            value = tuple(_python(item) for item in (() if value is None else value))
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        found = repr(value)
        raise RequestError(name, f"{found if len(found) <= 60 else found[:57] + '...'}: {error}") from None


def _python(value: Any) -> Any:
    """A NumPy scalar as Python's own number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
