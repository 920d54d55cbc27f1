"""OpenTelemetry traces, where they are asked for: a span for each POST and, below it, one for each of its choices.

Made from the record of a request that has ended (`tracking.Record`), so nothing of it stands on a token's path; a
thread of the SDK sends them. Attributes follow OpenTelemetry's conventions for HTTP and generative AI. No text is
among them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import atlas
from atlas.errors import ConfigError
from atlas.serve.telemetry.tracking import Generation, Record

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

MOST_CHOICES = 16
"""Choices of one request that get a span; a request may have thousands."""

CLOSING_SECONDS = 1.0


class Traces:
    """Listens to requests that end (`Service.finished`); `close` sends what is left."""

    def __init__(self, endpoint: str, model: str, exporter: SpanExporter | None = None) -> None:
        """endpoint: URL that takes traces as OTLP over HTTP.  exporter: takes them instead.

        Raises ConfigError where the packages are missing.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                "--otlp-traces-endpoint", f"a package is missing ({error.name})", fix="pip install 'atlas-infer[otel]'"
            ) from None
        self._server, self._inside = SpanKind.SERVER, set_span_in_context
        self._error = Status(StatusCode.ERROR)
        self._extract = TraceContextTextMapPropagator().extract
        self._model = model
        # Not the global provider: what else this process may trace is not ours to decide.
        resource = Resource.create({"service.name": "atlas", "service.version": atlas.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("atlas.serve", atlas.__version__)

    def __call__(self, record: Record) -> None:
        if record.method != "POST":
            return
        fields = record.summary()
        attributes: dict[str, str | int] = {
            "http.request.method": record.method,
            "http.route": record.endpoint,
            "http.response.status_code": record.status,
            "atlas.request_id": record.id,
            "gen_ai.request.model": self._model,
        }
        if record.generations:
            attributes["gen_ai.usage.input_tokens"] = fields["prompt_tokens"]
            attributes["gen_ai.usage.output_tokens"] = fields["generated_tokens"]
        if record.error is not None:
            attributes["error.type"] = record.error
        span = self._tracer.start_span(
            f"{record.method} {record.endpoint}",
            context=self._extract(_trace_headers(record)),
            kind=self._server,
            attributes=attributes,
            start_time=_epoch(record, record.began),
        )
        if span.is_recording():
            for generation in record.generations[:MOST_CHOICES]:
                self._choice(record, generation, self._inside(span))
        if record.error is not None or record.status >= 500:
            span.set_status(self._error)
        span.end(_epoch(record, record.ended))

    def _choice(self, record: Record, generation: Generation, context: Context) -> None:
        span = self._tracer.start_span(
            "generate",
            context=context,
            attributes={
                "gen_ai.usage.input_tokens": generation.prompt_tokens,
                "gen_ai.usage.output_tokens": generation.tokens,
                "gen_ai.request.max_tokens": generation.max_tokens,
                "gen_ai.response.finish_reasons": [generation.finish_reason or "abort"],
            },
            start_time=_epoch(record, generation.began),
        )
        if generation.timing is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", generation.timing.queued)
            span.set_attribute("gen_ai.latency.time_in_model_prefill", generation.timing.prefill)
        if generation.first:
            span.set_attribute("gen_ai.latency.time_to_first_token", generation.first - record.arrived)
            span.set_attribute("gen_ai.latency.time_in_model_decode", generation.last - generation.first)
        span.end(_epoch(record, generation.ended or record.ended))

    def close(self) -> None:
        """Send what has not been sent. Without a collector the SDK would try for 7 s."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)


def _trace_headers(record: Record) -> dict[str, str]:
    """The caller's own span, which ours then belongs to."""
    wanted = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in record.headers if name in wanted}


def _epoch(record: Record, at: float) -> int:
    """A time of `perf_counter` in nanoseconds since 1970."""
    return int((record.began_at + at - record.began) * 1e9)
