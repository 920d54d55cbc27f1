"""What counting costs: `python -m bench.metrics_cost`. Microseconds, the best of nine runs.

An output is what a step gives one request: at 128 requests and 5 ms a step there are 25,600 in a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import timeit
from collections.abc import Callable
from time import perf_counter
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from atlas import logs
from atlas.engine.messages import Ready, Stats
from atlas.engine.work import SIZES, WorkCount
from atlas.serve.telemetry import exposition, tracking
from atlas.serve.telemetry.metrics import GENERATING, Metrics, engine_series


def best(work: Callable[[], Any], number: int) -> float:
    """Microseconds of one call."""
    return min(timeit.repeat(work, number=number, repeat=9)) / number * 1e6


def step() -> Callable[[], None]:
    """What `Engine.step` does for its numbers."""
    count = WorkCount()

    def work() -> None:
        began, filled, submitted = perf_counter(), perf_counter(), perf_counter()
        count.submitted(128, 128, submitted - filled)
        count.schedule += filled - began + perf_counter() - submitted
        began, collected = perf_counter(), perf_counter()
        count.wait += collected - began
        count.output += perf_counter() - collected

    return work


def request(metrics: Metrics) -> Callable[[], None]:
    """A POST through the layer that tracks it, with its line in the log as JSON, and around nothing."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(_: Message) -> None:
        return

    logs.configure("info", "json", "api", open(os.devnull, "w"))  # noqa: SIM115
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    tracked = tracking.Tracking(app, metrics, [])
    scope = {"type": "http", "method": "POST", "headers": []}

    async def many() -> None:
        for _ in range(1000):
            await tracked(scope, receive, send)

    return lambda: asyncio.run(many())


def main() -> None:
    metrics = Metrics()
    record = tracking.Record("r", "POST", [], metrics)
    token = tracking.current.set(record)
    generation = tracking.Generation(100, 100, True)
    print(f"{best(step(), 20000):8.2f} us a step, in the engine")
    print(f"{best(lambda: generation.received(1, None), 20000):8.2f} us an output, in the API process")
    tracking.current.reset(token)
    print(f"{best(request(metrics), 1) / 1000:8.2f} us an HTTP request, its line in the log included")
    for endpoint in GENERATING:
        for status in ("200", "400", "429", "503"):
            metrics.http_requests.add(1, endpoint, "POST", status)
        metrics.http_seconds.of(endpoint, "POST").observe(1.0)
    for endpoint in ("/health", "/metrics", "/v1/models"):
        metrics.http_requests.add(1, endpoint, "GET", "200")
        metrics.http_seconds.of(endpoint, "GET").observe(0.001)
    memory = [(f"owner {i}", i) for i in range(12)]
    count = WorkCount()
    count.submitted(1, 1, 0.1)
    stats = Stats(1, 1, 1, 10, 1, 0, count.so_far())
    assert len(stats.work.steps_by_rows) == SIZES
    series = [*metrics.series(), *engine_series(True, Ready("", "", "", 1, 1, [], memory), stats)]

    def scrape() -> bytes:
        return asyncio.run(exposition.render(series, "atlas", {"model_name": "m"}, ""))[0]

    def longest() -> float:
        """Microseconds of the longest piece, after each of which others may run."""
        pieces, work = [], exposition.render(series, "atlas", {"model_name": "m"}, "")
        try:
            while True:
                began = perf_counter()
                work.send(None)
                pieces.append(perf_counter() - began)
        except StopIteration:
            return max(pieces) * 1e6

    text, cost = scrape(), best(scrape, 20)
    print(
        f"{cost:8.0f} us a scrape of {len(text)} bytes, in pieces of {min(longest() for _ in range(20)):.0f} us at most"
    )


if __name__ == "__main__":
    main()
