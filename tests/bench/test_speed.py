"""Speed cases on a tiny model in process, and on a server with a scripted engine."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas.bench import plot, roofline
from atlas.bench.__main__ import main
from atlas.bench.local import LocalTarget
from atlas.bench.remote import RemoteTarget
from atlas.bench.speed import Case, cases, measure
from atlas.errors import ConfigError
from atlas.llm import LLM
from tests import tiny_model
from tests.serve.serve_harness import RunningServer, behaviour, make_checkpoint

RATES = {"read": 1e9, "f32": 1e9, "bf16": 0.0, "int8": 0.0}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTarget]:
    model = tiny_model.write(tmp_path_factory.mktemp("bench") / "m")
    local = LocalTarget(LLM(model, backend="cpu", quant="f32", max_seqs=4, threads=1))
    yield local
    stats = local.llm.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)
    local.close()


def test_in_process_requests_are_exactly_what_was_asked(target: LocalTarget) -> None:
    prompts = target.prompts(7, 33, seed=1)
    assert prompts == target.prompts(7, 33, seed=1) != target.prompts(7, 33, seed=2)
    records = target.run(prompts, 5, concurrency=3)
    assert [(r.prompt_tokens, r.tokens, len(r.arrivals), r.error) for r in records] == [(33, 5, 5, "")] * 7
    for index, record in enumerate(records):
        assert record.submitted < record.arrivals[0] < record.arrivals[-1] == record.finished
        under_way = sum(other.submitted <= record.submitted < other.finished for other in records)
        assert under_way <= 3, f"request {index}"


def test_a_request_that_the_engine_refuses_is_a_failure(target: LocalTarget) -> None:
    good = target.prompts(2, 4, seed=0)
    (result,) = measure_prompts(target, [good[0], [99999], good[1]])
    assert (result["requests"], result["failures"]) == (3, 1) and "99999" in result["errors"][0]


def measure_prompts(target: LocalTarget, prompts: list[list[int]]) -> list[dict[str, Any]]:
    class Fixed:
        def __init__(self) -> None:
            self.description: dict[str, Any] = {}

        def prompts(self, count: int, tokens: int, seed: int) -> list[list[int]]:
            return prompts

        def run(self, prompts: Any, output_tokens: int, concurrency: int) -> Any:
            return target.run(prompts, output_tokens, concurrency)

        def close(self) -> None: ...

    return measure(Fixed(), [Case("ladder", 4, 3, 2, 3)], repeats=1, warm_up=0, seed=0)


def test_cases() -> None:
    assert [case.name for case in cases("prefill", [8, 16], 1, [1], 1)] == ["prefill 8+1 x1", "prefill 16+1 x1"]
    assert [(c.concurrency, c.requests) for c in cases("decode", [8], 4, [1, 8], 3)] == [(1, 1), (8, 8)]
    assert [(c.concurrency, c.requests) for c in cases("ladder", [8], 4, [1, 8], 3)] == [(1, 3), (8, 24)]


def test_roofline_by_hand(target: LocalTarget) -> None:
    """The tiny model in f32: every matrix once, the KV cache of three sequences."""
    hidden, inner, vocab, layers, q, kv = 64, 96, 320, 2, 128, 64
    weights = layers * ((q + 2 * kv) * hidden + q * hidden + 3 * hidden * inner) + vocab * hidden
    moved, operations = target.llm.engine_thread.call(lambda engine: roofline.decode_cost(engine, 3, 40))
    assert operations == 3 * (2 * weights + layers * 4 * 41 * q)
    least = 4 * weights + layers * 2 * 4 * 3 * 41 * kv
    assert least < moved < 1.25 * least, "activations, norms and the new rows of the cache come on top"
    prompt = target.llm.engine_thread.call(lambda engine: roofline.prefill_cost(engine, 50))
    pairs = layers * 4 * q * 50 * 51 // 2
    once = vocab * hidden + 3 * hidden * inner  # the head and the last MLP see the last row alone
    assert prompt[1] == 50 * 2 * (weights - once) + 2 * once + pairs
    line = target.llm.engine_thread.call(lambda e: roofline.line(e.runner, RATES, (200_000_000, 100_000_000), 4, 8.0))
    assert (line["bandwidth_share"], line["arithmetic_share"], line["bound"]) == (0.4, 0.2, "memory")
    assert line["bytes_per_token"] == 50_000_000 and line["arithmetic"] == "f32"
    assert "40% of 1.0 GB/s" in roofline.sentence(line)


def test_the_machines_rates_are_measured(target: LocalTarget) -> None:
    rates = target.llm.engine_thread.call(lambda engine: roofline.measured_rates(engine.runner, 1))
    assert rates is not None and 1e8 < rates["read"] < 1e12 and 1e8 < rates["f32"] < 1e13


def test_the_command_writes_json_that_any_reader_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "measured_rates", lambda runner, threads: RATES)
    model, out, chart = tiny_model.write(tmp_path / "m"), tmp_path / "r.json", tmp_path / "c.svg"
    options = ["--backend", "cpu", "--quant", "f32", "--threads", "1", "--repeats", "2", "--json", str(out)]
    ladder = ["--prompt-tokens", "5", "--output-tokens", "4", "--concurrency", "1,2", "--plot", str(chart)]
    assert main(["ladder", str(model), *options, *ladder]) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [case["concurrency"] for case in result["cases"]] == [1, 2]
    for case in result["cases"]:
        assert case["requests"] == 2 * 3 * case["concurrency"] and case["failures"] == 0
        assert len(case["output_tokens_per_s"]["values"]) == 2 and case["case"] in printed
        assert case["roofline"]["bytes_per_token"] > 0
    assert result["settings"]["quant"] == "f32" and {"commit", "machine", "versions", "date"} <= set(result)
    curves = ElementTree.parse(chart).getroot().iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(curves)) == 2 * 5
    assert main(["prefill", str(model), *options, "--prompt-tokens", "300"]) == 2
    assert "--prompt-tokens: 301 tokens" in capsys.readouterr().err


def test_ctrl_c_is_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalTarget, "run", interrupted)
    monkeypatch.setattr(roofline, "measured_rates", lambda runner, threads: RATES)
    model, out = tiny_model.write(tmp_path / "m"), tmp_path / "r.json"
    assert main(["prefill", str(model), "--prompt-tokens", "5", "--json", str(out)]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n" and not out.exists()


def test_plot_places_points_where_they_belong() -> None:
    text = plot.svg([plot.Panel("a < b", "x", "y", {"one": [(1, 0), (4, 8)], "two": [(2, 4)]})], "caption & more")
    root = ElementTree.fromstring(text)
    places = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x2 == pytest.approx((x0 + x1) / 2) and y2 == pytest.approx((y0 + y1) / 2) and y1 < y0 and x0 < x1


# ---- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    script: dict[str, Any] = {"default": behaviour("abcdefgh", end=None), "behaviours": {}}
    running = RunningServer(folder, script, make_checkpoint(folder / "m"))
    try:
        yield running.wait_ready()
    finally:
        running.close()


def test_a_server_is_measured_by_its_own_counts(server: RunningServer) -> None:
    target = RemoteTarget(server.url + "/v1", "key", None, True, 30.0)
    records = target.run(target.prompts(6, 12, seed=3), 9, concurrency=2)
    assert len(records) == 6
    for record in records:
        assert record.error == "" and record.tokens == 9 and record.prompt_tokens > 12
        assert record.submitted < record.arrivals[0] <= record.arrivals[-1] <= record.finished


def test_failures_of_a_server_are_counted(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    url = ["--url", server.url + "/v1", "--api-key", "top-secret", "--json", str(out), "--repeats", "1"]
    assert main(["decode", *url, "--served-model", "another", "--concurrency", "2"]) == 1
    assert "FAILED: 2 of 2: HTTP 404" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["cases"][0]["failures"] == 2 and "top-secret" not in out.read_text()


def test_wrong_settings_are_named(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["decode", "--url", "nonsense"], "--url: 'nonsense'"),
        (["decode", "--url", server.url + "/v1", "--quant", "bf16"], "--quant: given with --url"),
        (["decode", "--url", "http://127.0.0.1:1/v1"], "is the server up?"),
        (["decode", "--url", server.url], "most servers' base URL ends in /v1"),
        (["decode", "smollm2-135m", "--url", server.url + "/v1"], "MODEL: smollm2-135m with --url"),
        (["ladder", "--max-seqs", "x"], "max_seqs: 'x'"),
        (["ladder", "--plot", "c.png"], "--plot: c.png; accepted: a name that ends in .svg"),
        (["ladder", "--plot", "absent/c.svg"], "--plot: absent/c.svg cannot be written"),
        (["ladder", "--json", "/"], "--json: / cannot be written"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--url"):
        RemoteTarget("ftp://host", "", "m", True, 1.0)
