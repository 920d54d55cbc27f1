"""What /metrics tells: every name with its meaning, counted in this process as things happen.

Only additions here, for they stand on the path of every token. The text that Prometheus reads is made by
`exposition.py` when it asks. Names and labels are those that dashboards of LLM servers expect, behind a prefix of
ours (docs/metrics.md). A label's values come from our own code or from the operator, never from a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import get_args

from atlas.engine.messages import FinishReason, Ready, Stats
from atlas.targets.shape import KV_BLOCK_SIZE

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
"""Endpoints that generate tokens."""

_LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_TOKEN_TIMES = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
_HTTP_TIMES = (0.005, 0.02, 0.1, 0.5, 2, 10, 60)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

Labels = tuple[str, ...]


class Number:
    """A counter (its name ends in _total) or a gauge. values: by the values of its labels."""

    def __init__(self, name: str, meaning: str, *labels: str) -> None:
        self.name, self.meaning, self.labels = name, meaning, labels
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def put(self, value: float, *labels: str) -> Number:
        self.values[labels] = value
        return self


class Buckets:
    """One distribution. counts: of values up to each bound and above the one before; the last of those above all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class Histogram:
    """values: by the values of its labels."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float], *labels: str) -> None:
        self.name, self.meaning, self.bounds, self.labels = name, meaning, bounds, labels
        self.values: dict[Labels, Buckets] = {} if labels else {(): Buckets(bounds)}

    def of(self, *labels: str) -> Buckets:
        """The distribution of these label values."""
        if (found := self.values.get(labels)) is None:
            found = self.values[labels] = Buckets(self.bounds)
        return found

    def observe(self, value: float, times: int = 1) -> None:
        """Of a histogram without labels."""
        self.values[()].observe(value, times)


Series = Number | Histogram


class Metrics:
    """What this process sees. A *request* is one choice of one prompt: what the engine computes as a sequence."""

    def __init__(self) -> None:
        self.requests = Number(
            "request_success_total",
            "Requests that ended, by why: stop and length are successes, abort is a client that went away.",
            "endpoint",
            "finished_reason",
        )
        self.prompt_tokens = Number("prompt_tokens_total", "Prompt tokens of requests that had their first token.")
        self.generation_tokens = Number("generation_tokens_total", "Tokens generated.")
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From the request's last byte to its first token.", _LATENCIES
        )
        self.inter_token = Histogram(
            "inter_token_latency_seconds",
            "From one token to the next, as the server sends them. Tokens sent together share the time.",
            _TOKEN_TIMES,
        )
        self.per_output_token = Histogram(
            "request_time_per_output_token_seconds", "A request's mean time between its tokens.", _TOKEN_TIMES
        )
        self.end_to_end = Histogram(
            "e2e_request_latency_seconds", "From the request's last byte to its end, for whatever reason.", _LATENCIES
        )
        self.queue = Histogram(
            "request_queue_time_seconds", "From the request's arrival in the engine to its first step.", _LATENCIES
        )
        self.prefill = Histogram(
            "request_prefill_time_seconds", "From the request's first step to its first token.", _LATENCIES
        )
        self.inference = Histogram(
            "request_inference_time_seconds", "From the request's first step to its last token.", _LATENCIES
        )
        self.decode = Histogram("request_decode_time_seconds", "From a request's first token to its last.", _LATENCIES)
        self.prompt_lengths = Histogram("request_prompt_tokens", "Prompt tokens of a request that ended.", _LENGTHS)
        self.generation_lengths = Histogram(
            "request_generation_tokens", "Generated tokens of a request that ended.", _LENGTHS
        )
        self.max_tokens = Histogram("request_params_max_tokens", "The most tokens that a request may have.", _LENGTHS)
        self.errors = Number("request_errors_total", "Answers that are errors, by their code.", "endpoint", "code")
        self.http_requests = Number(
            "http_requests_total",
            "HTTP requests, by route, method and status (0: no answer was sent).",
            "handler",
            "method",
            "status",
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "From an HTTP request's first byte to the last of its answer.",
            _HTTP_TIMES,
            "handler",
            "method",
        )
        self.restarts = Number("engine_restarts_total", "Times that a dead engine was started again.")
        # A rate starts with what a counter was before the first event: so those that are known exist from the start.
        for endpoint in GENERATING:
            for reason in get_args(FinishReason):
                self.requests.put(0, endpoint, reason)

    def series(self) -> list[Series]:
        """All of them."""
        return list(vars(self).values())


def response_series(stored: int, size: int, running: int) -> list[Series]:
    """What is kept of /v1/responses, and how many of them are made in the background."""
    return [
        Number("stored_responses", "Responses that clients may read again or continue.").put(stored),
        Number("stored_responses_bytes", "Memory that they take; --response-memory bounds it.").put(size),
        Number("background_responses", "Responses that are being made in the background.").put(running),
    ]


def engine_series(up: bool, ready: Ready | None, stats: Stats | None) -> list[Series]:
    """What the engine says of itself. What is not known is left out."""
    series: list[Series] = [Number("engine_up", "1 while the engine serves, else 0.").put(up)]
    if ready is not None:
        memory = Number("memory_bytes", "Memory that the model takes on its device and for its steps.", "owner")
        for owner, size in ready.memory:
            memory.add(size, owner)
        series.append(memory)
    if stats is None:
        return series
    work = stats.work
    seconds = Number(
        "step_seconds_total",
        "The step loop's time: schedule and output are the host's; submit hands steps to the backend, which on a CPU "
        "computes them; wait is for a GPU.",
        "part",
    )
    for part in ("schedule", "submit", "wait", "output"):
        seconds.put(getattr(work, part), part)
    used = stats.total_blocks - stats.free_blocks
    return [
        *series,
        Number("num_requests_running", "Requests that have a place in the engine's batch.").put(stats.running),
        Number("num_requests_waiting", "Requests that wait for one.").put(stats.waiting),
        Number("kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1.").put(
            used / stats.total_blocks if stats.total_blocks else 0.0
        ),
        Number("kv_cache_tokens", "Tokens that the KV cache holds when full.").put(stats.total_blocks * KV_BLOCK_SIZE),
        Number("num_preemptions_total", "Times that a request lost its KV blocks and was computed again.").put(
            stats.preemptions
        ),
        Number("steps_total", "Steps of the engine.").put(stats.steps),
        seconds,
        Number(
            "mask_seconds_total",
            "Time in which masks (of grammars above all) were made: beside the forward pass, where a GPU makes that.",
        ).put(work.masks),
        Number("grammar_errors_total", "Requests that ended because their grammar could not be followed.").put(
            work.grammar_errors
        ),
        _sizes("iteration_tokens_total", "Tokens computed in one step.", work.steps_by_rows, work.rows),
        _sizes("iteration_requests", "Requests in one step: the batch.", work.steps_by_sequences, work.sequences),
    ]


def _sizes(name: str, meaning: str, counts: Sequence[int], total: int) -> Histogram:
    """Of classes that double, as `Work` has them: the last is of all that is larger."""
    histogram = Histogram(name, meaning, [2**i for i in range(max(len(counts) - 1, 0))])
    buckets = histogram.of()
    buckets.counts, buckets.total = list(counts) or [0], float(total)
    return histogram
