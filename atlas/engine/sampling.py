"""What a request may ask for: how its tokens are chosen, what is told about them, and when it ends.

The order of processing, for every token, on every backend:

1. *raw logits*: log-probabilities that are reported are their log-softmax, so they say what the model
   thinks and not what was done to it afterwards;
2. `logit_bias` is added; then `repetition_penalty` (Keskar et al. 2019, as in transformers: a positive logit
   of a token that occurred is divided by it, another multiplied); then `frequency_penalty` times the token's
   count and `presence_penalty` are subtracted (OpenAI's definition, on generated tokens only); then masks
   (`min_tokens`, grammars) forbid tokens;
3. temperature, top_k, top_p, min_p, in this order: each works on what the one before it left. Temperature 0
   takes the most likely token (the lowest id of equals) instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, get_args

import msgspec

from atlas.errors import RequestError
from atlas.ops.logprobs import MAX_TOP

MAX_LOGPROBS = MAX_TOP
MAX_CHOICES = 128
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
REPETITION_RANGE = (0.01, 100.0)
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": REPETITION_RANGE,
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
}


GrammarSyntax = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]


Pooling = Literal["mean", "last"]


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text of an answer must be: each of its tokens is chosen among those that some such text goes on with.

    syntax: what `text` is.
        json_object: empty; any JSON object.
        json_schema: a JSON Schema, as JSON; a JSON text that it accepts.
        regex: a regular expression that the whole answer matches (Rust's `regex` syntax).
        choice: a JSON array of strings; one of them.
        lark: a grammar in Lark's syntax with llguidance's additions; its start rule is `start`.
        gbnf: a grammar in llama.cpp's syntax (also known as EBNF); its start rule is `root`.
    """

    syntax: GrammarSyntax
    text: str = ""


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an answer's thinking ends. A grammar begins after it.

    end: token ids of the marker that ends it, at least one.
    inside: the prompt ends inside thinking, so that the answer begins there.
    budget: after so many tokens inside, the marker's ids are forced; None: the model ends it.
    begin: token ids of the marker that begins it, for models that may open it themselves; () if none do.
    """

    end: tuple[int, ...]
    inside: bool = True
    budget: int | None = None
    begin: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sequence's parameters. Text-level wishes (stop strings, several choices) are the front end's.

    max_tokens: upper bound on generated tokens; 0 computes the prompt only.
    min_tokens: before so many are generated, none of `stop_token_ids` can be chosen.
    temperature: 0 means greedy (argmax); otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 keeps all. Ties at the threshold are kept.
    top_p: then keep the smallest set of most likely tokens whose probability reaches it; 1 keeps all, 0 the
        most likely one.
    min_p: then keep tokens at least so likely as `min_p` times the most likely one; 0 keeps all.
    repetition_penalty: for tokens of the prompt and of the answer; 1 is none.
    presence_penalty, frequency_penalty: for tokens of the answer; 0 is none.
    logit_bias: token id -> what is added to its logit.
    seed: with the position of the token it is the whole state of the random choice, so the same
        seed gives the same text whatever else runs. Several choices of one request: see `choice_seed`.
    stop_token_ids: end the request; the id itself counts as generated and is reported. The model's own
        end ids are among them unless the client asked to ignore those: the engine knows no others.
    logprobs: report the log-probability of each generated token and of the so many most likely ones;
        None reports nothing.
    prompt_logprobs: the same for each token of the prompt but the first.
    grammar: what the answer must be; None: anything. Its end ends the request, as a stop token does.
    thinking: the answer may begin with thinking, which no grammar is for.
    priority: requests of a lower one run first.
    pooling: instead of tokens, tell what the model's head would read, each vector of which stands for a text up to a
        token: their mean over the prompt, or the last one. With max_tokens 0, and for the mean with prompt_logprobs 0,
        which makes a step leave the rows of all the prompt's tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    priority: int = 0
    pooling: Pooling | None = None

    @property
    def penalises(self) -> bool:
        """Some penalty is on, so that tokens must be counted."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """What the model thought of one token, given those before it.

    logprob: natural logarithm of its probability; -inf for a token that it excludes.
    rank: 1 for the most likely token; equals are ordered by id.
    top_ids, top_logprobs: the most likely tokens in order, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: its own for choice 0, else a 64-bit mix (SplitMix64,
    Steele et al. 2014) of both, so that choices of requests with neighbouring seeds are independent too."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def token_biases(given: Mapping[Any, Any]) -> dict[int, float]:
    """`logit_bias` as users write it: an id may be a string of digits, as JSON's keys are; `check` knows the ranges.

    Raises:
        RequestError: a key that is no token id, one id in two spellings, or a bias that is no number.
    """
    result: dict[int, float] = {}
    for key, bias in given.items():
        digits = isinstance(key, str) and re.fullmatch(r"[0-9]{1,18}", key)
        if not digits and (not isinstance(key, Integral) or isinstance(key, bool)):
            raise RequestError("logit_bias", f"the key {repr(key)[:40]}", "token ids as keys")
        if not isinstance(bias, Real) or isinstance(bias, bool):
            raise RequestError("logit_bias", f"{repr(bias)[:40]} for token id {key}", "a number")
        if int(key) in result:
            raise RequestError("logit_bias", f"token id {int(key)} twice", "each token id once")
        try:
            result[int(key)] = float(bias)
        except OverflowError:  # an integer beyond what a float holds
            result[int(key)] = math.inf
    return result


def for_model(params: SamplingParams, ends: Iterable[int], vocab_size: int) -> SamplingParams:
    """Checked parameters of a request, which the model's own end ids stop too.

    ends: none for a request that ignores them. Ids outside the vocabulary, which configurations do hold (-1 for
        "none"), end nothing.

    Raises:
        RequestError: as `check`.
    """
    check(params, vocab_size)
    stops = {*params.stop_token_ids, *(end for end in ends if 0 <= end < vocab_size)}
    whole = msgspec.structs.replace(params, stop_token_ids=tuple(sorted(stops)), top_k=min(params.top_k, vocab_size))
    check(whole, vocab_size)
    return whole


def check(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError naming the first field that is out of range."""
    if params.max_tokens < 0:
        raise RequestError("max_tokens", str(params.max_tokens), "an integer of at least 0")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise RequestError("min_tokens", str(params.min_tokens), "an integer from 0 to max_tokens")
    if params.top_k < 0:
        raise RequestError("top_k", str(params.top_k), "a positive integer, or 0 for all tokens")
    for name, (low, high) in RANGES.items():
        value = getattr(params, name)
        if not low <= value <= high:
            raise RequestError(name, str(value), f"a number from {low:g} to {high:g}")
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise RequestError("logit_bias", f"token id {token}", f"0..{vocab_size - 1}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise RequestError("logit_bias", f"{bias} for token id {token}", f"a number within +-{MAX_BIAS:g}")
    for position, token in enumerate(params.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise RequestError(f"stop_token_ids[{position}]", str(token), f"ids from 0 to {vocab_size - 1}")
    if params.min_tokens > 0 and len(set(params.stop_token_ids)) == vocab_size:
        found = f"{params.min_tokens}, and every token of the vocabulary is an end"
        raise RequestError("min_tokens", found, "0, or fewer stop_token_ids")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise RequestError(name, str(value), f"an integer from 0 to {MAX_LOGPROBS}")
    if params.grammar is not None and params.grammar.syntax not in get_args(GrammarSyntax):
        raise RequestError("grammar.syntax", repr(params.grammar.syntax), ", ".join(get_args(GrammarSyntax)))
    if params.thinking is not None:
        _check_thinking(params.thinking, vocab_size)
    if params.pooling is not None and params.max_tokens != 0:
        raise RequestError("pooling", f"with max_tokens {params.max_tokens}", "max_tokens 0")
    if params.pooling == "mean" and params.prompt_logprobs != 0:
        raise RequestError("pooling", f"a mean with prompt_logprobs {params.prompt_logprobs}", "prompt_logprobs 0")
    if not -(1 << 63) <= params.priority < 1 << 63:
        raise RequestError("priority", str(params.priority), "a 64-bit integer")
    if not -(1 << 63) <= params.seed < 1 << 63:
        raise RequestError("seed", str(params.seed), "a 64-bit integer")


def _check_thinking(thinking: Thinking, vocab_size: int) -> None:
    if not thinking.end:
        raise RequestError("thinking.end", "no token ids", "those of the marker that ends thinking")
    for name in ("end", "begin"):
        for position, token in enumerate(getattr(thinking, name)):
            if not 0 <= token < vocab_size:
                raise RequestError(f"thinking.{name}[{position}]", str(token), f"ids from 0 to {vocab_size - 1}")
    if thinking.budget is not None and thinking.budget < 0:
        raise RequestError("thinking.budget", str(thinking.budget), "an integer of at least 0")
