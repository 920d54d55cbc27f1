"""Traces, as a collector receives them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from serve_harness import Start, eventually

from atlas.errors import ConfigError
from atlas.serve.telemetry.traces import Traces

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

CHAT = "/v1/chat/completions"
YO = [{"role": "user", "content": "yo"}]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes traces over HTTP and keeps their spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                for resource in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def test_a_request_is_a_span_with_one_for_each_choice(start: Start, collector: Collector) -> None:
    server = start("--otlp-traces-endpoint", collector.url).wait_ready()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    body = {"messages": YO, "seed": 60, "n": 2, "max_tokens": 50}
    assert server.http.post(CHAT, json=body, headers=headers).status_code == 200
    assert server.http.post(CHAT, json={"messages": YO, "seed": 4}).status_code == 500
    server.http.get("/health")
    server.process.terminate()  # what is left is sent at the end
    assert server.process.wait(10) == 0
    eventually(lambda: len(collector.spans) == 5)
    named = {span.span_id: span for span in collector.spans}
    (mine,) = [span for span in named.values() if attributes(span).get("atlas.request_id") == "mine"]
    assert (mine.trace_id.hex(), mine.parent_span_id.hex(), mine.name) == (TRACE, PARENT, f"POST {CHAT}")
    told = attributes(mine)
    assert told["http.response.status_code"] == 200 and told["gen_ai.usage.output_tokens"] == 2 * 17
    choices = [span for span in named.values() if span.parent_span_id == mine.span_id]
    assert [span.name for span in choices] == ["generate"] * 2
    for span in choices:
        assert mine.start_time_unix_nano <= span.start_time_unix_nano < span.end_time_unix_nano
        assert span.end_time_unix_nano <= mine.end_time_unix_nano
        assert attributes(span)["gen_ai.usage.output_tokens"] == 17
        assert attributes(span)["gen_ai.latency.time_to_first_token"] > 0
    (failed,) = [span for span in named.values() if attributes(span).get("error.type")]
    assert attributes(failed)["error.type"] == "generation_failed" and failed.status.code == 2
    assert not [span for span in named.values() if "health" in span.name]


def test_a_collector_that_is_not_there_disturbs_nobody(start: Start) -> None:
    server = start("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces").wait_ready()
    assert server.http.post(CHAT, json={"messages": YO, "seed": 1}).status_code == 200
    server.process.terminate()
    assert server.process.wait(3) == 0


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint: a package is missing .* 'atlas-infer\[otel\]'"):
        Traces("http://127.0.0.1:9/", "m")
