"""The whole product: `python -m atlas.serve` on trained weights, driven by the official client."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.real_server import RealServer
from tests.serve.serve_harness import environment, eventually

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper and the sea."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RealServer]:
    with RealServer(tmp_path_factory.mktemp("real"), smollm2_path).started() as running:
        yield running


def streamed(chunks: Any) -> tuple[str, str | None]:
    """Text and finish reason of a stream."""
    text, reason = "", None
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def test_an_answer_that_is_right(server: RealServer) -> None:
    answer = server.chat(QUESTION, temperature=0, max_tokens=40)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_answer_in_parts(server: RealServer) -> None:
    whole = server.chat(STORY, temperature=0, max_tokens=50).choices[0]
    text, reason = streamed(server.chat(STORY, temperature=0, max_tokens=50, stream=True))
    assert (text, reason) == (whole.message.content, whole.finish_reason) and reason == "length"


def test_completions_of_text_and_of_ids_agree(server: RealServer) -> None:
    def ask(prompt: Any) -> str:
        answer = server.client.completions.create(model="smollm2-135m", prompt=prompt, temperature=0, max_tokens=12)
        return answer.choices[0].text

    assert ask("a  12") == ask([81, 256, 33, 34]) != ""


def test_a_stop_string_is_not_sent(server: RealServer) -> None:
    text = server.chat(STORY, temperature=0, max_tokens=50).choices[0].message.content
    stop = text[len(text) // 2 :][:5]
    expected = text[: text.index(stop)]
    for options in ({}, {"stream": True}):
        answer = server.chat(STORY, temperature=0, max_tokens=50, stop=[stop], **options)
        got = streamed(answer) if options else (answer.choices[0].message.content, answer.choices[0].finish_reason)
        assert got == (expected, "stop")


def test_a_seed_gives_the_same_text_whatever_the_load(server: RealServer) -> None:
    """Alone, beside others of all lengths that come and go, streamed, and as one of several choices."""
    topics = ["the sea", "a lighthouse and its keeper who has seen too many storms", "bread"]
    requests: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.4, "top_k": 40, "repetition_penalty": 1.2},
        {"temperature": 0.8, "min_p": 0.05, "frequency_penalty": 0.5, "logit_bias": {"30": 5}},
    ]

    def ask(number: int, **options: Any) -> str:
        fields = {"max_tokens": 16, "seed": 100 + number, **requests[number]}
        known = {name: fields.pop(name) for name in ("top_k", "min_p", "repetition_penalty") if name in fields}
        turn: Any = [{"role": "user", "content": f"Tell me of {topics[number]}."}]
        answer = server.chat(turn, **fields, **options, extra_body=known)
        return streamed(answer)[0] if options.get("stream") else str(answer.choices[0].message.content)

    alone = [ask(number) for number in range(3)]
    assert len(set(alone)) == 3
    stop = threading.Event()

    def noise(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            words: Any = [{"role": "user", "content": "word " * rng.randrange(1, 300)}]
            with server.chat(words, temperature=1.2, max_tokens=rng.randrange(1, 30), stream=True) as stream:
                for count, _ in enumerate(stream):
                    if count > 8 and rng.random() < 0.1:
                        break

    results: list[tuple[int, str]] = []
    others = [threading.Thread(target=noise, args=(number,)) for number in range(4)]
    loads: list[dict[str, Any]] = [{}, {"stream": True}, {"n": 3}]
    own = [
        threading.Thread(target=lambda n=n, load=load: results.append((n, ask(n, **load))))
        for load in loads
        for n in range(3)
    ]
    for thread in others + own:
        thread.start()
        time.sleep(0.03)
    for thread in own:
        thread.join(120)
    stop.set()
    for thread in others:
        thread.join(60)
    assert len(results) == 9
    assert all(text == alone[number] for number, text in results), (alone, results)


def test_errors_name_the_field_and_leave_the_server_well(server: RealServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.chat(QUESTION, max_tokens=-1)
    assert caught.value.body["param"] == "max_tokens"  # type: ignore[index]
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(model="smollm2-135m", prompt=[5] * 2000)
    assert "2000" in str(caught.value) and "1024" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("another")
    assert "Paris" in server.chat(QUESTION, temperature=0, max_tokens=20).choices[0].message.content


def test_random_cancels_of_32_streams_leave_no_block(server: RealServer) -> None:
    """Some streams run out, some are closed after a few chunks, some before the first."""
    total = server.info()["engine"]["total_blocks"]
    rng = random.Random(7)
    finished, failures = [], []

    def one(limit: int | None) -> None:
        try:
            with server.chat(STORY, temperature=0.8, max_tokens=24, stream=True) as stream:
                for count, _ in enumerate(stream):
                    if limit is not None and count >= limit:
                        return
            finished.append(1)
        except Exception as error:
            failures.append(error)

    limits = [rng.choice([0, 1, 3, 8, None, None]) for _ in range(32)]
    threads = [threading.Thread(target=one, args=(limit,)) for limit in limits]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join(240)
    assert not failures and len(finished) == limits.count(None)
    assert server.idle()["free_blocks"] == total


def test_server_info_says_what_runs_and_why(server: RealServer) -> None:
    info = server.info()
    assert info["kernel_set"] == "cpu/*/bf16" and info["reason"].startswith(("no GPU: ", "no kernel set for "))
    assert info["max_context"] == 1024 and info["start"]["weights"] > 0
    assert info["target"] == {"hardware": "cpu", "model": "*", "quant": "bf16"}
    assert info["config"]["max_seqs"] == {"value": 12, "origin": "flag"}


def test_metrics_of_the_real_engine(server: RealServer) -> None:
    def scrape() -> dict[str, float]:
        time.sleep(1.1)  # the engine is asked once a second
        text = httpx.get(server.url + "/metrics", timeout=30).text
        families = text_string_to_metric_families(text)
        return {s.name + str(s.labels.get("part", "")): s.value for family in families for s in family.samples}

    before = scrape()
    usage = server.chat([{"role": "user", "content": "Say a word"}], max_tokens=7, temperature=0).usage
    after = scrape()
    grew = {name: value - before.get(name, 0) for name, value in after.items()}
    # The last token is never computed again: its row is the next one's.
    assert grew["atlas:iteration_tokens_total_sum"] == usage.prompt_tokens + usage.completion_tokens - 1
    assert grew["atlas:steps_total"] == grew["atlas:iteration_requests_count"] == usage.completion_tokens
    assert grew["atlas:step_seconds_totalsubmit"] > 10 * grew["atlas:step_seconds_totalwait"]
    assert 0 < grew["atlas:request_queue_time_seconds_sum"] < grew["atlas:e2e_request_latency_seconds_sum"]
    assert grew["atlas:request_prefill_time_seconds_sum"] < grew["atlas:time_to_first_token_seconds_sum"]
    assert after["atlas:memory_bytes"] > 0 and after["process_resident_memory_bytes"] > 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/does/not/exist"], "/does/not/exist"),
        (["smolm2-135m"], "smollm2-135m"),
        (["{empty}"], "{empty}"),
        (["{cut}"], "{cut}"),
    ],
)
def test_a_model_that_cannot_be_served_is_named(
    tmp_path: Path, smollm2_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    cut = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        cut.write_bytes(file.read(60 << 20))
    names = {"empty": str(tmp_path / "empty"), "cut": str(cut)}
    command = [sys.executable, "-m", "atlas.serve", "--offline", "--port", "0"]
    result = subprocess.run(
        [*command, *(argument.format(**names) for argument in arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )
    assert result.returncode in (1, 2)
    assert message.format(**names) in result.stderr and "Traceback" not in result.stderr


def test_sigterm_ends_it_and_leaves_nothing(server: RealServer) -> None:
    """Last: the module's server goes. All of its processes get the signal, as systemd stops a service: what runs still
    finishes."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    server.chat(QUESTION, max_tokens=1, response_format=schema)  # starts a process that compiles grammars
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True, text=True
    ).stdout.split()
    assert len(children) >= 2
    stream = iter(server.chat(STORY, max_tokens=200, stream=True, extra_body={"ignore_eos": True}))
    next(stream)
    for pid in (server.process.pid, *map(int, children)):
        os.kill(pid, signal.SIGTERM)
    assert streamed(stream)[1] == "length"
    assert server.process.wait(20) == 0
    for child in children:
        eventually(lambda pid=int(child): not _exists(pid), 10)
    assert not list(server.output.parent.glob("atlas-*"))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
