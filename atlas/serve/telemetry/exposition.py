"""The text that Prometheus reads. Imported by the first scrape: `prometheus_client` takes 50 ms to import, and no start
should wait for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from atlas.serve.telemetry.metrics import Histogram, Number, Series

_process = CollectorRegistry(auto_describe=False)
"""Memory, processor time and open files of this process, as every client library names them."""
ProcessCollector(registry=_process)

_END = b"# EOF\n"
"""OpenMetrics says when it is complete."""


async def render(series: Sequence[Series], prefix: str, common: Mapping[str, str], accept: str) -> tuple[bytes, str]:
    """The text and its content type. It takes 3 ms in all, so others may run after each name.

    prefix: stands before each name, with a colon, but for those of HTTP that every web server has.
    common: labels of all series.  accept: the request's header, which may ask for OpenMetrics.
    """
    encode, content_type = _encoder(accept)
    parts = [encode(_process)]
    for one in series:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(one, prefix, common))
        parts.append(encode(registry))
        await asyncio.sleep(0)
    text = b"".join(part.removesuffix(_END) for part in parts)
    return text + (_END if parts[-1].endswith(_END) else b""), content_type


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """What writes the kind of text that is asked for. Every scraper takes colons in names, but the library turns them
    into underscores, in samples only, unless the header says that it need not."""
    encode, content_type = choose_encoder(accept)
    if isinstance(encode, partial):
        encode = partial(encode, escaping="allow-utf-8")
        content_type = content_type.replace("escaping=underscores", "escaping=allow-utf-8")
    return encode, content_type


class _Collector:
    def __init__(self, series: Series, prefix: str, common: Mapping[str, str]) -> None:
        self._series, self._prefix, self._common = series, prefix, common

    def collect(self) -> Iterator[Metric]:
        series = self._series
        own = not series.name.startswith("http_")
        name = f"{self._prefix}:{series.name}" if own else series.name
        common = self._common if own else {}
        labels, values = (*common, *series.labels), tuple(common.values())
        if isinstance(series, Histogram):
            yield _histogram(name, series, labels, values)
        else:
            yield _number(name, series, labels, values)


def _number(name: str, series: Number, labels: tuple[str, ...], values: tuple[str, ...]) -> Metric:
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    metric = family(name, series.meaning, labels=labels)
    for own, value in series.values.items():
        metric.add_metric((*values, *own), value)
    return metric


def _histogram(name: str, series: Histogram, labels: tuple[str, ...], values: tuple[str, ...]) -> Metric:
    metric = HistogramMetricFamily(name, series.meaning, labels=labels)
    bounds = [*(str(float(bound)) for bound in series.bounds), "+Inf"]
    for own, buckets in series.values.items():
        pairs = list(zip(bounds, accumulate(buckets.counts), strict=True))
        metric.add_metric((*values, *own), pairs, buckets.total)
    return metric
