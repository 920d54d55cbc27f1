"""What many requests amount to, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from atlas.bench.records import Record, decode_rate, percentiles, spread, summarise


def record(submitted: float, arrivals: list[float], tokens: int | None = None, prompt: int = 10) -> Record:
    return Record(submitted, prompt, len(arrivals) if tokens is None else tokens, arrivals, arrivals[-1])


def test_two_requests_by_hand() -> None:
    run = [record(0.0, [1.0, 1.5, 2.0, 3.0]), record(0.0, [2.0, 2.5, 3.5, 4.0])]
    found = summarise([run])
    assert found["output_tokens"] == 8 and found["output_tokens_per_s"]["median"] == 2.0
    assert found["requests_per_s"]["values"] == [0.5]
    assert found["ttft_ms"]["p50"] == 1500.0 and found["end_to_end_ms"]["p50"] == 3500.0
    assert found["inter_token_ms"]["mean"] == pytest.approx(1e3 * 4 / 6, rel=1e-5)
    assert found["prefill_tokens_per_s"]["values"] == [10.0, 5.0]
    # From 2.0 (both have begun) to 3.0 (one has ended): one token of the first, one of the second.
    assert decode_rate(run) == 2.0 and found["decode_tokens_per_s"]["median"] == 2.0


def test_chunks_of_several_tokens_count_as_tokens() -> None:
    run = [record(0.0, [1.0, 2.0, 3.0], tokens=9)]
    assert decode_rate(run) == 4.0
    assert summarise([run])["time_per_output_token_ms"]["p50"] == 250.0


def test_failures_count_and_leave_the_percentiles_alone() -> None:
    good, bad = record(0.0, [1.0, 2.0]), Record(0.0, error="HTTP 500: no", finished=8.0)
    found = summarise([[good, bad], [good, good]])
    assert (found["requests"], found["failures"], found["errors"]) == (4, 1, ["HTTP 500: no"])
    assert found["ttft_ms"] == {"p50": 1000.0, "p90": 1000.0, "p99": 1000.0, "mean": 1000.0}
    assert found["output_tokens_per_s"]["values"] == [0.25, 2.0], "the time of a failure is part of the repeat"
    nothing = summarise([[bad]])
    assert nothing["failures"] == nothing["requests"] == 1 and nothing["ttft_ms"] is None
    assert nothing["decode_tokens_per_s"] is None and nothing["output_tokens_per_s"]["median"] == 0.0


def test_requests_that_were_never_all_at_once_have_no_decode_rate() -> None:
    assert decode_rate([record(0.0, [1.0, 2.0]), record(0.0, [2.0, 3.0])]) is None
    assert decode_rate([record(0.0, [1.0])]) is None and decode_rate([]) is None


def test_spread_and_percentiles() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0, 2.0]}
    assert percentiles([float(n) for n in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "mean": 50.0}
    assert spread([]) is None and percentiles([]) is None
