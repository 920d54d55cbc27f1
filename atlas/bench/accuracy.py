"""What a format costs in accuracy: perplexity, KL divergence of the next-token distribution, and the most likely token,
against the same model in f32, over sliding windows of one text (atlas/llm/scoring.py says how they lie)."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atlas.errors import AtlasError, ConfigError
from atlas.llm import LLM
from atlas.llm.scoring import BLOCK_TOKENS, Array, mean_interval, perplexity_of, windows
from atlas.progress import Progress
from atlas.targets.quant import recipe

REFERENCE = "f32"


@dataclasses.dataclass(frozen=True)
class Subject:
    """One row of the table: a checkpoint in a format."""

    name: str
    model: str
    quant: str


@dataclasses.dataclass
class Scores:
    """Per scored token, float64: negative log-likelihood, KL(reference || subject) in nats, same most likely token."""

    nll: Array
    kl: Array
    top1: Array


def subjects(model: str, formats: Sequence[str], compare: Sequence[str]) -> list[Subject]:
    """The reference first. `compare`: PATH or PATH@FORMAT (default f32: the checkpoint's stored values, exactly).

    Raises ConfigError: a format that does not exist.
    """
    rows = [Subject(REFERENCE, model, REFERENCE)]
    rows += [Subject(quant, model, quant) for quant in formats if quant != REFERENCE]
    for given in compare:
        path, _, quant = given.rpartition("@") if "@" in given else (given, "", REFERENCE)
        rows.append(Subject(f"{Path(path).name}@{quant}", path, quant))
    for row in rows:
        recipe(row.quant)
    return rows


def measure(
    model: str,
    text: str,
    rows: Sequence[Subject],
    *,
    window: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    options: Mapping[str, Any],
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score every subject on the text; a subject that cannot be loaded is a row that says why.

    The reference's log-probabilities are kept in a temporary file: 4 bytes x scored tokens x vocabulary.

    tokens: of the text, at most so many.  options: of LLM.

    Raises:
        AtlasError: the reference itself cannot be loaded, or the text does not fit the options.
    """
    progress = progress or Progress()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryFile(prefix="atlas-accuracy-") as file:
        with LLM(model, **{**options, "quant": REFERENCE}) as llm:
            ids = llm.tokenizer.encode(text, add_special_tokens=True)[:tokens]
            window, stride = llm.windowing(window, stride)
            if len(ids) < 2:
                raise ConfigError("--text", f"{len(ids)} tokens", "at least 2")
            shape = (len(ids) - 1, llm.vocab_size)
            file.truncate(4 * math.prod(shape))
            kept: Any = np.memmap(file, np.float32, "r+", shape=shape)
            began = time.perf_counter()
            progress.begin(REFERENCE, shape[0], "token")
            reference = _score(llm, ids, window, stride, kept, progress, first=True)
            seconds = time.perf_counter() - began
            results.append(_row(rows[0], reference, reference, window, stride, seconds, _weights(llm)))
            report(results[-1])
        for subject in rows[1:]:
            try:
                llm = LLM(subject.model, **{**options, "quant": subject.quant})
            except AtlasError as error:
                results.append({"name": subject.name, "quant": subject.quant, "skipped": str(error)})
                report(results[-1])
                continue
            with llm:
                if llm.vocab_size != shape[1]:
                    found = f"a vocabulary of {llm.vocab_size}"
                    raise ConfigError(f"--compare {subject.model}", found, f"{shape[1]}, the reference's")
                began = time.perf_counter()
                progress.begin(subject.name, shape[0], "token")
                scores = _score(llm, ids, window, stride, kept, progress, first=False)
                seconds = time.perf_counter() - began
                results.append(_row(subject, scores, reference, window, stride, seconds, _weights(llm)))
            report(results[-1])
    return {
        "model": model,
        "text_tokens": len(ids),
        "scored_tokens": len(ids) - 1,
        "window": window,
        "stride": stride,
        "intervals": f"95 %, normal, over the means of blocks of {BLOCK_TOKENS} consecutive tokens",
        "rows": results,
    }


def _weights(llm: LLM) -> dict[str, int]:
    """Bytes of the weights by format."""
    owned = llm.engine_thread.call(lambda engine: engine.runner.memory)
    return {owner.removeprefix("weights "): size for owner, size in owned if owner.startswith("weights ")}


def _score(llm: LLM, ids: list[int], window: int, stride: int, kept: Any, progress: Progress, *, first: bool) -> Scores:
    """Score each token once. `kept` [scored tokens, vocab] holds the reference's log-probabilities: written by the
    first subject, read by the others."""
    parts = windows(ids, window, stride)
    targets = np.array(ids)
    count = len(ids) - 1
    scores = Scores(np.full(count, np.nan), np.zeros(count), np.ones(count))

    def take(index: int, position: int, logits: Array) -> None:
        progress.advance(len(logits))
        begin = parts[index][0] + position
        rows = slice(begin, begin + len(logits))
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
        at = np.arange(len(logits))
        scores.nll[rows] = -log_p[at, targets[begin + 1 : begin + 1 + len(logits)]]
        if first:
            kept[rows] = log_p
            return
        known = kept[rows]
        with np.errstate(invalid="ignore"):
            # A token that the reference excludes contributes nothing, whatever the subject says.
            terms = np.where(np.isneginf(known), 0.0, np.exp(known) * (known - log_p))
        scores.kl[rows] = terms.sum(axis=1, dtype=np.float64)
        scores.top1[rows] = log_p.argmax(axis=1) == known.argmax(axis=1)

    llm.score([scored for _, scored in parts], take)
    return scores


def _row(
    subject: Subject,
    scores: Scores,
    reference: Scores,
    window: int,
    stride: int,
    seconds: float,
    weights: dict[str, int],
) -> dict[str, Any]:
    found = perplexity_of(scores.nll, window, stride)
    # Paired: the text's own ups and downs are in both and cancel.
    difference = scores.nll - reference.nll
    change = [100 * (math.exp(value) - 1) for value in (float(difference.mean()), *mean_interval(difference))]
    return {
        "name": subject.name,
        "quant": subject.quant,
        "model": subject.model,
        "perplexity": found.perplexity,
        "perplexity_interval": found.interval,
        "nll": found.nll,
        "perplexity_change_percent": change[0],
        "perplexity_change_interval": change[1:],
        "kl": float(scores.kl.mean()),
        "kl_interval": mean_interval(scores.kl),
        "kl_p99": float(np.quantile(scores.kl, 0.99)),
        "top1_match": float(scores.top1.mean()),
        "top1_interval": mean_interval(scores.top1),
        "weight_bytes": weights,
        "seconds": round(seconds, 1),
    }


def header() -> str:
    """The first line of the table."""
    columns = f"{'perplexity':>10} {'(95 %)':>19} {'change':>9} {'(95 %)':>19} {'KL':>9} {'p99':>9} {'top-1':>8}"
    return f"{'format':<20} {'weights, B':>10} {columns}"


def table_line(row: Mapping[str, Any]) -> str:
    """One row for people."""
    if "skipped" in row:
        return f"{row['name']:<20} skipped: {row['skipped']}"

    def interval(name: str, form: str) -> str:
        # One block of tokens has no spread to estimate.
        return " .. ".join(format(end, form) for end in row[name]) if math.isfinite(row[name][1]) else "-"

    return (
        f"{row['name']:<20} {sum(row['weight_bytes'].values()) / 1e6:>9.1f}M"
        f" {row['perplexity']:>10.4f} {interval('perplexity_interval', '.3f'):>19}"
        f" {row['perplexity_change_percent']:>+8.3f}% {interval('perplexity_change_interval', '+.3f'):>19}"
        f" {row['kl']:>9.2e} {row['kl_p99']:>9.2e} {row['top1_match']:>8.3%}"
    )
