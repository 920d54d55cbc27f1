"""One request as it was seen from outside, and what many of them amount to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass
class Record:
    """Times are seconds of `time.perf_counter()`.

    tokens: generated, as the engine or the server's own `usage` counts them.
    arrivals: when each token came (in process), or each chunk of a stream (over HTTP).
    error: why the request failed; a failed request counts as failed and in no percentile.
    """

    submitted: float
    prompt_tokens: int = 0
    tokens: int = 0
    arrivals: list[float] = dataclasses.field(default_factory=list)
    finished: float = 0.0
    error: str = ""


def summarise(runs: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """Repeats of one case as numbers.

    Rates are per repeat, over the time from its first submission to its last end, failures included in the time;
    `median`, `min` and `max` over the repeats show the spread. Times are percentiles over the requests of all
    repeats together:

    ttft_ms: submission to first token.  inter_token_ms: between successive arrivals.
    time_per_output_token_ms: (last - first arrival) / (tokens - 1) of each request.  end_to_end_ms: submission to end.
    decode_tokens_per_s: while all requests of a repeat were generating, None where they never were all at once.
    prefill_tokens_per_s: prompt tokens over time to first token, of each request by itself.
    """
    everything = [record for run in runs for record in run]
    good = [record for record in everything if not record.error]
    failures = [record.error for record in everything if record.error]
    seconds = [max(r.finished for r in run) - min(r.submitted for r in run) for run in runs]
    served = [[record for record in run if not record.error] for run in runs]
    return {
        "repeats": len(runs),
        "requests": len(everything),
        "failures": len(failures),
        "errors": sorted(set(failures))[:5],
        "prompt_tokens": sorted({record.prompt_tokens for record in good}),
        "output_tokens": sum(record.tokens for record in good),
        "output_tokens_per_s": spread([sum(r.tokens for r in run) / s for run, s in zip(served, seconds, strict=True)]),
        "requests_per_s": spread([len(run) / s for run, s in zip(served, seconds, strict=True)]),
        "decode_tokens_per_s": spread([rate for run in served if (rate := decode_rate(run)) is not None]),
        "prefill_tokens_per_s": spread([r.prompt_tokens / (r.arrivals[0] - r.submitted) for r in good]),
        "ttft_ms": percentiles([1e3 * (r.arrivals[0] - r.submitted) for r in good]),
        "inter_token_ms": percentiles([1e3 * gap for r in good for gap in np.diff(r.arrivals)]),
        "time_per_output_token_ms": percentiles(
            [1e3 * (r.arrivals[-1] - r.arrivals[0]) / (r.tokens - 1) for r in good if r.tokens > 1]
        ),
        "end_to_end_ms": percentiles([1e3 * (r.finished - r.submitted) for r in good]),
    }


def decode_rate(run: Sequence[Record]) -> float | None:
    """Tokens per second from the moment when the last request had its first token until the first request ended."""
    if not run or any(len(record.arrivals) < 2 for record in run):
        return None
    begin, end = max(r.arrivals[0] for r in run), min(r.arrivals[-1] for r in run)
    if end <= begin:
        return None
    # A chunk may hold several tokens; of one request they are taken as equally many.
    tokens = sum(
        sum(begin < time <= end for time in r.arrivals[1:]) * (r.tokens - 1) / (len(r.arrivals) - 1) for r in run
    )
    return tokens / (end - begin)


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median and extremes; None of nothing."""
    if not values:
        return None
    return {
        "median": _rounded(np.median(values)),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
        "values": [_rounded(value) for value in values],
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99 (linear interpolation) and the mean; None of nothing."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    return {
        **{f"p{p}": _rounded(v) for p, v in zip(PERCENTILES, found, strict=True)},
        "mean": _rounded(np.mean(values)),
    }


def _rounded(value: Any) -> float:
    return float(f"{float(value):.6g}")
