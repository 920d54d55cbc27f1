"""/metrics after known traffic, read back by Prometheus' own parser."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from serve_harness import RunningServer, Start, behaviour, eventually

from atlas.engine.messages import FinishReason, Ready, Stats
from atlas.serve.telemetry.metrics import Metrics, engine_series, response_series
from atlas.serve.telemetry.tracking import Record, Tracking

YO = [{"role": "user", "content": "yo"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Scrape:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples with these labels, which there have to be."""
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"{name} {labels} is not there"
        return sum(found)

    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}


def scrape(server: RunningServer) -> Scrape:
    response = server.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return Scrape(response.text)


def ask(server: RunningServer, path: str = CHAT, **fields: Any) -> httpx.Response:
    prompt = {"messages": YO} if path == CHAT else {"prompt": "yo"}
    return server.http.post(path, json={**prompt, **fields})


@contextlib.contextmanager
def streaming(server: RunningServer, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun; left, the client is gone."""
    body = {"messages": YO, "stream": True, **fields}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=10) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def test_known_traffic_gives_known_numbers(start: Start) -> None:
    server = start().wait_ready()
    before = scrape(server)
    lengths = []
    for _ in range(2):
        usage = ask(server, seed=1).json()["usage"]  # "abcDEFGHIJklm" and the end of the turn
        lengths.append((usage["prompt_tokens"], usage["completion_tokens"]))
    usage = ask(server, TEXT, seed=2, max_tokens=9, n=2).json()["usage"]
    assert usage["completion_tokens"] == 18
    lengths += [(usage["prompt_tokens"], 9)] * 2
    after = scrape(server)

    def grew(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    assert grew("atlas:request_success_total", endpoint=CHAT, finished_reason="stop") == 2
    assert grew("atlas:request_success_total", endpoint=TEXT, finished_reason="length") == 2
    assert grew("atlas:request_success_total") == 4
    assert grew("atlas:generation_tokens_total") == sum(generated for _, generated in lengths)
    assert grew("atlas:prompt_tokens_total") == sum(prompt for prompt, _ in lengths)
    assert grew("atlas:request_generation_tokens_bucket", le="10.0") == 2
    assert grew("atlas:request_generation_tokens_bucket", le="20.0") == 4
    assert grew("atlas:request_generation_tokens_sum") == sum(generated for _, generated in lengths)
    assert grew("atlas:inter_token_latency_seconds_count") == sum(generated - 1 for _, generated in lengths)
    for name in ("time_to_first_token", "e2e_request_latency", "request_decode_time"):
        assert grew(f"atlas:{name}_seconds_count") == 4
    assert after.sum("http_requests_total", handler=CHAT, method="POST", status="200") == 2
    assert after.sum("http_request_duration_seconds_count", handler=TEXT) == 1
    # The engine's part: the script says 10 blocks, all free.
    assert after.sum("atlas:engine_up") == 1
    assert after.sum("atlas:kv_cache_usage_perc") == 0
    assert after.sum("atlas:num_requests_running") == 0


def test_times_are_those_of_the_answer(start: Start) -> None:
    """Five tokens, 50 ms before each."""
    server = start().wait_ready()
    assert ask(server, seed=3, max_tokens=5).json()["usage"]["completion_tokens"] == 5
    now = scrape(server)
    assert 0.05 <= now.sum("atlas:time_to_first_token_seconds_sum") < 0.2
    assert 0.19 <= now.sum("atlas:inter_token_latency_seconds_sum") < 0.6
    decode, first = now.sum("atlas:request_decode_time_seconds_sum"), now.sum("atlas:time_to_first_token_seconds_sum")
    assert decode == pytest.approx(now.sum("atlas:inter_token_latency_seconds_sum"))
    assert now.sum("atlas:request_time_per_output_token_seconds_sum") == pytest.approx(decode / 4)
    assert first + decode <= now.sum("atlas:e2e_request_latency_seconds_sum") < first + decode + 0.1


def test_queue_and_prefill_times_come_from_the_engine(start: Start) -> None:
    server = start(behaviours={"9": behaviour("ok", timing=[0.25, 1.5])}).wait_ready()
    ask(server, seed=9)
    now = scrape(server)
    assert now.sum("atlas:request_queue_time_seconds_sum") == 0.25
    assert now.sum("atlas:request_prefill_time_seconds_sum") == 1.5
    assert now.sum("atlas:request_prefill_time_seconds_count") == 1


def test_aborted_and_failed_requests_are_counted_as_such(start: Start) -> None:
    server = start().wait_ready()
    with streaming(server, seed=3) as lines:
        next(line for line in lines if "content" in line)
    eventually(lambda: scrape(server).sum("atlas:request_success_total", finished_reason="abort") == 1)
    assert ask(server, seed=4).status_code == 500
    assert ask(server, seed=4, stream=True).status_code == 200  # the error is in the stream
    assert ask(server, max_tokens="many").status_code == 400
    now = scrape(server)
    assert now.sum("atlas:request_success_total", endpoint=CHAT, finished_reason="error") == 2
    assert now.sum("atlas:request_success_total") == 3, "a request that was refused is none of the engine's"
    assert now.sum("atlas:request_errors_total", endpoint=CHAT, code="generation_failed") == 2
    assert now.sum("atlas:request_errors_total", endpoint=CHAT) == 3
    assert now.sum("http_requests_total", handler=CHAT, status="400") == 1
    assert now.sum("atlas:e2e_request_latency_seconds_count") == 3


def test_a_scrape_while_streaming(start: Start) -> None:
    server = start().wait_ready()
    with streaming(server, seed=3) as lines:
        next(line for line in lines if "content" in line)
        first = scrape(server)
        assert first.sum("atlas:time_to_first_token_seconds_count") == 1
        assert first.sum("atlas:request_success_total") == 0
        eventually(lambda: scrape(server).sum("atlas:num_requests_running") == 1)
        later = eventually(lambda: scrape(server).sum("atlas:generation_tokens_total") > 5)
        assert later
        next(line for line in lines if "content" in line)


def test_no_text_of_a_client_becomes_a_label(start: Start) -> None:
    """However many paths, methods, fields and models they make up, there are no more series."""
    server = start().wait_ready()

    def disturb() -> None:
        marked = "secret" + secrets.token_hex(8)
        server.http.get(f"/{marked}")
        server.http.get(f"/v1/models/{marked}")
        server.http.request(marked.upper(), "/v1/models")
        server.http.request(marked.upper(), f"/{marked}")
        server.http.post(CHAT, json={"messages": YO, "model": marked}, headers={"x-request-id": marked})
        server.http.post(CHAT, json={"messages": YO, marked: marked, "max_tokens": 1})
        server.http.post(CHAT, json={"messages": marked})
        server.http.post(TEXT, json={"prompt": marked, "stop": marked, "user": marked, "max_tokens": 1})

    disturb()
    first = scrape(server)
    for _ in range(10):
        disturb()
    text = server.http.get("/metrics").text
    assert "secret" not in text.lower()
    assert len(Scrape(text).samples) == len(scrape(server).samples)
    handlers = {sample.labels["handler"] for sample in first.samples if "handler" in sample.labels}
    assert len(Scrape(text).samples) - len(first.samples) < 30, "only /metrics itself is new"
    assert handlers >= {CHAT, TEXT, "/v1/models/{model:path}", "other"}


@pytest.mark.parametrize("escaping", ["", "; escaping=allow-utf-8", "; escaping=underscores"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_names_are_the_same_in_every_format(shared: RunningServer, kind: str, escaping: str) -> None:
    """Samples belong to the families above them, under the names that docs/metrics.md has."""
    response = shared.http.get("/metrics", headers={"Accept": f"{kind}; version=1.0.0{escaping}"})
    assert response.headers["content-type"].startswith(kind)
    parse = parse_openmetrics if kind.startswith("application") else text_string_to_metric_families
    families = {family.name: family for family in parse(response.text)}
    assert families["atlas:generation_tokens"].samples[0].name == "atlas:generation_tokens_total"
    assert not [name for name, family in families.items() if family.type in ("unknown", "untyped")]


def test_every_histogram_is_whole(shared: RunningServer) -> None:
    """Counts grow with the bounds, and the last is all."""
    ask(shared, seed=1)
    now = scrape(shared)
    histograms = [family for family in now.families.values() if family.type == "histogram"]
    assert len(histograms) > 10
    for family in histograms:
        by_labels: dict[Any, list[float]] = collections.defaultdict(list)
        counts = {}
        for sample in family.samples:
            rest = frozenset((k, v) for k, v in sample.labels.items() if k != "le")
            if sample.name.endswith("_bucket"):
                by_labels[rest].append(sample.value)
            elif sample.name.endswith("_count"):
                counts[rest] = sample.value
        assert by_labels.keys() == counts.keys()
        for rest, values in by_labels.items():
            assert values == sorted(values) and values[-1] == counts[rest]


def test_the_prefix_and_the_name_of_the_model(start: Start) -> None:
    server = start("--metrics-prefix", "vllm", "--served-model-name", 'a "quoted"\\name').wait_ready()
    ask(server, seed=1)
    now = scrape(server)
    assert now.sum("vllm:request_success_total", model_name='a "quoted"\\name', finished_reason="stop") == 1
    assert not [name for name in now.names() if name.startswith("atlas")]


def test_metrics_while_loading_and_without_an_engine(start: Start) -> None:
    server = start(load_seconds=3.0, behaviours={"1": behaviour("ab", die_after=1)})
    eventually(lambda: server.health() == 503, 20)
    loading = scrape(server)
    assert loading.sum("atlas:engine_up") == 0
    assert "atlas:num_requests_running" not in loading.names(), "nobody knows"
    assert loading.sum("http_requests_total", handler="/health", status="503") >= 1
    server.wait_ready()
    assert scrape(server).sum("atlas:engine_up") == 1
    assert ask(server, seed=1).status_code == 500
    eventually(lambda: scrape(server).sum("atlas:engine_up") == 0, 2)


def test_the_engine_is_asked_once_a_second_at_most(start: Start) -> None:
    server = start().wait_ready()
    for _ in range(20):
        scrape(server)
    assert 1 <= len(server.events("stats")) <= 5


def test_an_engine_that_does_not_answer_holds_no_scrape(start: Start) -> None:
    """It computes a long prompt, since its start."""
    server = start(mute=True).wait_ready()
    response = server.http.get("/metrics", timeout=5)
    assert response.status_code == 200 and response.elapsed.total_seconds() < 2
    now = Scrape(response.text)
    assert now.sum("atlas:engine_up") == 1 and "atlas:num_requests_running" not in now.names()
    assert len(server.events("stats")) == 1


def test_the_page_says_what_every_name_means() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    told = dict(re.findall(r"^\| `([a-z0-9_]+)` \| [^|]* \| (.*) \|$", page, re.MULTILINE))
    ready = Ready("cpu", "cpu/x", "a test", 10, 10, [], [("weights", 1)])
    series = [*Metrics().series(), *response_series(0, 0, 0), *engine_series(True, ready, Stats(0, 0, 1, 1, 0))]
    assert told == {one.name: one.meaning for one in series}


def test_reasons_exist_from_the_start() -> None:
    reasons = {labels[1] for labels in Metrics().requests.values}
    assert reasons == set(get_args(FinishReason))


def test_a_listener_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Record] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    def broken(record: Record) -> None:
        raise ValueError("no")

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"x-request-id", b"mine")]}
    asyncio.run(Tracking(app, Metrics(), [broken, heard.append], lambda path: None)(scope, send, send))  # type: ignore[arg-type]
    assert [(record.id, record.status) for record in heard] == [("mine", 204)]
    assert sent[0]["headers"] == [(b"x-request-id", b"mine"), (b"request-id", b"mine")]
    assert "a listener failed" in caplog.text


# ---- request ids and logs --------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["a", "3f8c-11:22.x_y", "A" * 128])
def test_a_sane_request_id_is_kept(shared: RunningServer, sent: str) -> None:
    response = shared.http.get("/v1/models", headers={"x-request-id": sent})
    assert response.headers.get_list("x-request-id") == [sent]


@pytest.mark.parametrize("sent", ["", "a b", "é", '"', "A" * 129, "<script>", "-"])
def test_another_is_replaced(shared: RunningServer, sent: str) -> None:
    response = shared.http.get("/v1/models", headers={"x-request-id": sent.encode()})
    assert re.fullmatch(r"req_[0-9a-f]{24}", response.headers["x-request-id"])


def test_errors_and_streams_have_the_id(shared: RunningServer) -> None:
    mine = {"x-request-id": "mine-1"}
    for path, body, status in ((CHAT, {}, 400), ("/nothing", {}, 404), (CHAT, {"messages": YO, "seed": 4}, 500)):
        response = shared.http.post(path, json=body, headers=mine)
        assert response.status_code == status and response.headers["x-request-id"] == "mine-1"
        assert response.json()["error"]["request_id"] == "mine-1"
    response = shared.http.post(CHAT, json={"messages": YO, "seed": 4, "stream": True}, headers=mine)
    assert response.headers["x-request-id"] == "mine-1" and '"request_id":"mine-1"' in response.text


def log_lines(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.output.read_text().splitlines()]


def test_json_logs_have_one_line_a_request(start: Start) -> None:
    server = start("--log-format", "json").wait_ready()
    server.http.post(CHAT, json={"messages": YO, "seed": 1, "what\nis": 1}, headers={"x-request-id": "one"})
    server.http.post(CHAT, json={"messages": YO, "seed": 4}, headers={"x-request-id": "two"})
    server.http.get("/health")

    def finished() -> list[dict[str, Any]]:
        return [line for line in log_lines(server) if line["logger"] == "atlas.requests"]

    eventually(lambda: len(finished()) == 2)
    one, two = finished()
    assert one["request_id"] == "one" and one["status"] == 200 and one["endpoint"] == CHAT
    assert one["finish_reasons"] == {"stop": 1} and one["generated_tokens"] == 14
    assert one["level"] == "info" and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["time"])
    assert 0 < one["first_token_seconds"] <= one["seconds"]
    assert two["error"] == "generation_failed" and two["finish_reasons"] == {"error": 1}
    # What is logged on the way belongs to the request too; "ready" is a line like the others.
    (ignored,) = [line for line in log_lines(server) if "was ignored" in line["message"]]
    assert ignored["request_id"] == "one"
    assert next(line for line in log_lines(server) if line["message"].startswith("ready in"))["stages"]


def test_lines_for_people_end_with_the_id(start: Start) -> None:
    server = start().wait_ready()
    server.http.post(CHAT, json={"messages": YO, "seed": 1}, headers={"x-request-id": "one"})
    line = eventually(lambda: re.search(r".*atlas\.requests: .*", server.output.read_text()))[0]
    assert re.search(
        r"POST /v1/chat/completions 200 in [\d.]+ s: \d+ prompt tokens, 14 generated; stop 1 \[one\]$", line
    )


def test_version_and_settings_with_their_origin(start: Start) -> None:
    server = start("--seed", "7").wait_ready()
    info = server.http.get("/server_info").json()
    assert info["config"]["seed"] == {"value": 7, "origin": "flag"}
    assert info["config"]["drain_timeout"] == {"value": 30.0, "origin": "built-in"}
    assert info["sampling"]["temperature"]["value"] == 0.5
    assert info["engine"]["total_blocks"] == 10
    assert server.http.get("/version").json() == {"version": info["version"]}
