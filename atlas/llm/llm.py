"""`atlas.LLM`: load a model into this process and use it."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np

from atlas.config import offline_config
from atlas.engine.engine import Engine
from atlas.engine.grammar import compiler_of
from atlas.engine.messages import Stats
from atlas.engine.sampling import Grammar
from atlas.errors import CheckpointError, RequestError
from atlas.llm import prompts as prompting
from atlas.llm import scoring
from atlas.llm.collector import Collector, NoText, gather
from atlas.llm.engine_thread import EngineThread
from atlas.llm.outputs import RequestOutput, StreamOutput
from atlas.llm.prompts import Prompt
from atlas.llm.sampling_params import SamplingParams, for_each
from atlas.llm.scoring import Array, Perplexity, Scored
from atlas.presets import Presets
from atlas.runtime.extension import start_driver
from atlas.runtime.progress import WeightsBar
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.text.chat_template import ChatTemplate, load_template
from atlas.tokenizer import Tokenizer, end_ids
from atlas.weights import Checkpoint, open_checkpoint
from atlas.weights.fetch import resolve_model

_DEFAULT_WINDOW = 2048

_LOGIT_ROWS = 64
"""Logit rows of a step at least, for `logits` and `perplexity`: 4 bytes x vocabulary each. Weights are read once for
so many rows, and a product of 64 rows is bound by arithmetic, not by memory, on every CPU seen."""

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model in this process: no server, no second process.

    Args:
        model: a catalogue name, a directory, a GGUF file or a Hugging Face id, as for `python -m atlas.serve`.
        options: quant, kv_dtype, backend, kernel_pack, threads, max_context, max_seqs, max_rows, kv_memory, offline
            and chat_template, with the meaning and the checks of the server's flags (atlas/config.py).

    One thread of its own owns the engine. Every method may be called from any thread at any time; what several
    threads ask for runs in one batch. A forked child cannot use its parent's LLM and is told so; it may make its
    own, and a process may hold several. Ctrl-C, or leaving a stream before its end, aborts that call alone
    and frees its KV blocks.

    Attributes:
        model, backend, kernel_set: what was loaded, on what.   max_context: tokens of prompt and answer together.
        vocab_size: rows of the logits.   default_sampling_params: the server's defaults (docs/defaults.md).
        engine_thread: the engine's owner, for tools that measure (atlas/bench).

    `close()` (or the `with` statement) ends the thread and frees the memory; so does dropping the last reference.

    Raises:
        ConfigError, CheckpointError, DeviceError: as the server would at start.
    """

    def __init__(self, model: str | Path = "smollm2-135m", **options: Any) -> None:
        config = offline_config(model, options)
        start_driver(config.backend)
        path = resolve_model(config.model, offline=config.offline)
        with open_checkpoint(path) as checkpoint:
            self._tokenizer, self._no_tokenizer = _open_tokenizer(checkpoint)
            configured = end_ids(checkpoint.generation_config, checkpoint.config)
            self._ends = self._tokenizer.eos_token_ids if self._tokenizer else configured
            own = self._tokenizer.chat_template if self._tokenizer else None
            special = self._tokenizer.special_tokens_map if self._tokenizer else {}
            # A model without a usable template still completes texts; the reason is told where a chat is asked for.
            self._template, _ = load_template(own, special, config.chat_template, "chat_template")
            self._presets = Presets.of(
                checkpoint.config, checkpoint.generation_config, self._template, config, own_template=own
            )
            limits = dataclasses.replace(
                RunnerOptions.of(config.engine(path)), max_logits=max(config.max_seqs or 0, _LOGIT_ROWS)
            )
            runner = Runner.load(checkpoint, limits, weights_progress=WeightsBar())
        self._compiler = compiler_of(path)
        self.default_sampling_params = SamplingParams.of_model(self._presets.sampling())
        self.model = config.model_name
        self.max_context, self.vocab_size = runner.max_context, runner.config.shape.vocab_size
        self.backend, self.kernel_set = runner.backend.describe(), runner.choice.name
        self._n_seqs, self._n_blocks = runner.limits.n_seqs, runner.limits.n_blocks
        self.engine_thread = EngineThread(Engine(runner, self._compiler))
        # Not __del__: a finaliser also runs when the interpreter exits, before threads are frozen.
        self._finalizer = weakref.finalize(self, self.engine_thread.close)

    # ---- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs, end the engine's thread and free the model's memory. Idempotent."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"LLM({self.model!r}: {self.kernel_set}, context {self.max_context})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises CheckpointError when the checkpoint has none that can be used."""
        if self._tokenizer is None:
            raise CheckpointError("tokenizer", self._no_tokenizer, fix="give prompts as token ids")
        return self._tokenizer

    def stats(self) -> Stats:
        """Requests and KV blocks, a snapshot between two steps."""
        return self.engine_thread.call(lambda engine: engine.stats())

    # ---- text ----------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompts: Any, sampling_params: Params = ..., *, progress: bool = ..., stream: Literal[False] = ...
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self, prompts: Any, sampling_params: Params = ..., *, progress: bool = ..., stream: Literal[True]
    ) -> Iterator[StreamOutput]: ...
    def generate(
        self, prompts: Any, sampling_params: Params = None, *, progress: bool = True, stream: bool = False
    ) -> list[RequestOutput] | Iterator[StreamOutput]:
        """Continue one prompt or several.

        Args:
            prompts: a text, a list of token ids, or a list of such prompts. A text gets what the model's tokenizer adds
                (usually BOS); ids are taken as they are.
            sampling_params: for all prompts, or one for each; None: what the model's makers recommend, until the
                model ends its text or the context is full.
            progress: show a bar on a terminal (never elsewhere).
            stream: return an iterator of StreamOutput instead, as they are computed, of all prompts interleaved.

        Returns:
            One RequestOutput for each prompt, in order, also where one prompt was given.

        Raises:
            RequestError: a prompt or parameter is wrong; it names which one, and nothing has run.
        """
        parts = prompting.split(prompts)
        checked = [
            prompting.encode(where, prompt, self._encode, self.vocab_size, self.max_context) for where, prompt in parts
        ]
        return self._answer(checked, sampling_params, progress, stream)

    @overload
    def chat(
        self,
        messages: Any,
        sampling_params: Params = ...,
        *,
        tools: Any = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
        progress: bool = ...,
        stream: Literal[False] = ...,
    ) -> list[RequestOutput]: ...
    @overload
    def chat(
        self,
        messages: Any,
        sampling_params: Params = ...,
        *,
        tools: Any = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
        progress: bool = ...,
        stream: Literal[True],
    ) -> Iterator[StreamOutput]: ...
    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        *,
        tools: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
        stream: bool = False,
    ) -> list[RequestOutput] | Iterator[StreamOutput]:
        """Answer a conversation, or several, through the model's own chat template.

        Args:
            messages: a list of messages as the OpenAI API has them ({"role": ..., "content": ...}), or several
                such lists.
            tools: function definitions for the template, as the OpenAI API has them.
            chat_template_kwargs: more names for the template, such as enable_thinking, which without
                sampling_params chooses the sampling too.

        The rest is as for `generate`.

        Raises:
            RequestError: as there; for tools and names that the template does not read; and where the template
                refuses the messages, in its own words.
            CheckpointError: the model has no usable template.
        """
        template, tokenizer = self._chat_template(), self.tokenizer
        many = isinstance(messages, Sequence) and len(messages) > 0 and not isinstance(messages[0], Mapping)
        named = (
            [(f"messages[{index}]", part) for index, part in enumerate(messages)] if many else [("messages", messages)]
        )
        checked = [
            prompting.render(where, part, tokenizer, template, tools, chat_template_kwargs, self.max_context)
            for where, part in named or [("messages", messages)]
        ]
        if sampling_params is None:
            said = (chat_template_kwargs or {}).get(self._presets.switches.thinking or "")
            thinks = said if isinstance(said, bool) else self._presets.thinks
            if thinks != self._presets.thinks:
                sampling_params = SamplingParams.of_model(self._presets.sampling(thinks))
        return self._answer(checked, sampling_params, progress, stream)

    def _answer(
        self, prompts: list[Prompt], sampling: Params, progress: bool, stream: bool
    ) -> list[RequestOutput] | Iterator[StreamOutput]:
        params = for_each(len(prompts), self.default_sampling_params if sampling is None else sampling)
        requests = []
        for prompt, one in zip(prompts, params, strict=True):
            if one.stop and self._tokenizer is None:
                raise CheckpointError("tokenizer", self._no_tokenizer, fix="leave out `stop`, which is text")
            try:
                if one.structured_outputs is not None:
                    self._compile(one.structured_outputs)
                requests += one.choices(self.max_context - len(prompt.ids), self._ends, self.vocab_size)
            except RequestError as error:
                where = error.where if len(prompts) == 1 else f"sampling_params of {prompt.where}: {error.where}"
                raise RequestError(where, error.found, error.accepted, error.fix) from None
        text_stream = self._tokenizer.stream if self._tokenizer else NoText
        collector = Collector(prompts, params, text_stream, self._token_text)
        ids = [prompt.ids for prompt, one in zip(prompts, params, strict=True) for _ in range(one.n)]
        outputs = self._outputs(collector, ids, requests)
        return outputs if stream else gather(collector, outputs, progress)

    def _compile(self, grammar: Grammar) -> None:
        """Raises RequestError for a grammar that is none; one that is right is kept compiled."""
        if self._tokenizer is None:
            raise CheckpointError("tokenizer", self._no_tokenizer, fix="leave out `structured_outputs`, which are text")
        try:
            self._compiler.matcher(grammar)
        except RequestError as error:
            raise RequestError("structured_outputs", error.found, error.accepted) from None

    def _outputs(
        self, collector: Collector, ids: list[list[int]], requests: list[Any]
    ) -> Generator[StreamOutput, None, None]:
        submission = self.engine_thread.submission(len(requests))
        try:
            if requests:
                submission.send(ids, requests)
            while collector.unfinished:
                for arrival in submission.take():
                    delta, abort = collector.take(arrival)
                    if abort:
                        submission.abort(arrival.index)
                    if delta is not None:
                        yield delta
        finally:
            if collector.unfinished:
                submission.abort_all()

    # ---- numbers -------------------------------------------------------------------------------

    @overload
    def logits(self, tokens: Sequence[int]) -> Array: ...
    @overload
    def logits(self, tokens: Sequence[Sequence[int]]) -> list[Array]: ...
    def logits(self, tokens: Any) -> Array | list[Array]:
        """Raw logits after every position of given token ids (teacher forcing).

        Returns:
            float32 [n, vocab_size]; row i is what the model says about token i + 1. For a list of sequences, a list.

        Raises:
            RequestError: a sequence is empty, longer than the context, or holds an id outside the vocabulary.
        """
        parts = prompting.split(tokens, "tokens", "tokens", "token ids, or a list of such lists")
        sequences = [Scored(self._sequence(where, part)) for where, part in parts]
        results = [np.empty((len(scored.tokens), self.vocab_size), np.float32) for scored in sequences]

        def keep(index: int, position: int, rows: Array) -> None:
            results[index][position : position + len(rows)] = rows

        self.score(sequences, keep)
        return results[0] if parts and parts[0][0] == "tokens" else results

    def perplexity(self, text: str | Sequence[int], window: int | None = None, stride: int | None = None) -> Perplexity:
        """Perplexity of a text, or of token ids, in sliding windows: see Perplexity for how they lie.

        Args:
            text: at least two tokens; a text gets what the model's tokenizer adds, usually BOS.
            window: tokens of a window; None: 2048 or the context, if that is smaller.
            stride: tokens between windows; None: half a window.

        Raises:
            RequestError: a text too short, or a window that does not fit.
        """
        if not (isinstance(text, str) or prompting.is_list(text)):
            raise RequestError("text", f"a {type(text).__name__}", "a text or a list of token ids")
        ids = self._encode(text) if isinstance(text, str) else text
        tokens = [prompting.token_id(f"text[{position}]", token, self.vocab_size) for position, token in enumerate(ids)]
        window, stride = self.windowing(window, stride)
        if len(tokens) < 2:
            raise RequestError("text", f"{len(tokens)} tokens", "at least 2")
        nll = np.full(len(tokens), np.nan)
        parts = scoring.windows(tokens, window, stride)
        targets = np.array(tokens)

        def score(index: int, position: int, rows: Array) -> None:
            begin = parts[index][0] + position + 1
            nll[begin : begin + len(rows)] = scoring.token_nll(rows, targets[begin : begin + len(rows)])

        self.score([scored for _, scored in parts], score)
        return scoring.perplexity_of(nll[1:], window, stride)

    def windowing(self, window: int | None = None, stride: int | None = None) -> tuple[int, int]:
        """Window and stride as `perplexity` uses them. Raises RequestError."""
        for name, value in (("window", window), ("stride", stride)):
            if not (value is None or isinstance(value, int | np.integer)):
                raise RequestError(name, repr(value)[:40], "a number of tokens")
        window = min(_DEFAULT_WINDOW, self.max_context) if window is None else window
        if not 2 <= window <= self.max_context:
            raise RequestError("window", str(window), f"2 to {self.max_context}, the context")
        stride = max(1, window // 2) if stride is None else stride
        if not 1 <= stride < window:
            raise RequestError("stride", str(stride), f"1 to {window - 1}, less than the window")
        return window, stride

    def score(self, sequences: list[Scored], consume: scoring.Consume) -> None:
        """Teacher-forced logits piece by piece, for what must not hold them all: `consume` gets them in the engine's
        thread. Sequences are ids of the vocabulary, each 1 to max_context long; nothing is checked here."""
        thread, left = self.engine_thread, threading.Event()

        def go_on() -> bool:
            thread.check_open()
            return not left.is_set()

        try:
            for group in scoring.groups(sequences, self._n_blocks, self._n_seqs):
                blocks = sum(sequences[index].blocks for index in group)
                work = partial(scoring.run, sequences=sequences, group=group, consume=consume, go_on=go_on)
                thread.call(work, blocks)
        finally:
            left.set()  # Ctrl-C: the group that runs ends after its step

    # ---- helpers -------------------------------------------------------------------------------

    def _sequence(self, where: str, tokens: Any) -> list[int]:
        if not prompting.is_list(tokens):
            raise RequestError(where, f"a {type(tokens).__name__}", "a list of token ids")
        if not 1 <= len(tokens) <= self.max_context:
            raise RequestError(where, f"{len(tokens)} tokens", f"1 to {self.max_context}, the context")
        return [prompting.token_id(f"{where}[{i}]", token, self.vocab_size) for i, token in enumerate(tokens)]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=True)

    def _token_text(self, token: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            tokenizer = self.tokenizer
            if tokenizer.chat_template is None:
                raise CheckpointError("chat template", "this model has none", fix="use generate")
            self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)
        return self._template


def _open_tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, str]:
    """A model without a usable tokenizer still takes ids; the reason is told where text is asked for."""
    try:
        return Tokenizer.from_checkpoint(checkpoint), ""
    except CheckpointError as error:
        return None, f"this checkpoint has none that can be used ({error})"
