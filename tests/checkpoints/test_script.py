"""Scripted models through the server: every token has one successor, so texts, ends and probabilities are known."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints.cases import expected, params, path
from tests.serve.serve_harness import free_port

DRAWS, BATCH = 2000, 100
CHI_SQUARE = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51}
"""By degrees of freedom, what a right distribution exceeds once in 10,000 times."""

USER = [{"role": "user", "content": "yo"}]


class Server:
    """One server process; posts bodies and reads answers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.case, self.output = expected()["script"][name], folder / "output"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "atlas.serve", str(path("script", name)), "--port", str(port), "--quant", "f32"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
            )

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/health").status_code == 200:
                    return
            time.sleep(0.1)
        pytest.fail(f"not ready: {self.output.read_text()}")

    def post(self, route: str, status: int = 200, **body: Any) -> Any:
        answer = httpx.post(f"{self.url}/v1/{route}", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        # A strict reader: no NaN, no Infinity.
        return json.loads(answer.text, parse_constant=pytest.fail)

    def complete(self, **body: Any) -> tuple[str, str]:
        """Text and finish reason of a greedy completion, the same streamed and not."""
        body = {"temperature": 0, "max_tokens": 40, **body}
        whole = self.post("completions", **body)["choices"][0]
        text, reason = "", ""
        with httpx.stream("POST", f"{self.url}/v1/completions", json={**body, "stream": True}, timeout=60) as lines:
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    text, reason = text + choice["text"], choice["finish_reason"] or reason
        assert (text, reason) == (whole["text"], whole["finish_reason"])
        return text, reason


@pytest.fixture(scope="module", params=params("script"))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(request.param, tmp_path_factory.mktemp("script"))
    try:
        running.wait()
        yield running
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) in (0, 143)
    finally:
        running.process.kill()


def need(server: Server, *fields: str) -> dict[str, Any]:
    if missing := [field for field in fields if field not in server.case]:
        pytest.skip(f"this model has no {', '.join(missing)}")
    return dict(server.case)


def test_greedy_texts(server: Server) -> None:
    case = need(server, "runs")
    for run in case["runs"]:
        ends = run["greedy_ids"][-1] in case["stop_ids"]
        count = len(run["greedy_ids"])
        text, reason = server.complete(prompt=run["prompt_ids"], max_tokens=count)
        assert (text, reason) == (run["text"], "stop" if ends else "length")
        usage = server.post("completions", prompt=run["prompt_ids"], temperature=0, max_tokens=count)["usage"]
        assert usage["completion_tokens"] == count
        if ends:
            _, reason = server.complete(prompt=run["prompt_ids"], max_tokens=2 * count, ignore_eos=True)
            assert reason == "length"
        for cut in range(1, count):
            text, _ = server.complete(prompt=run["prompt_ids"], max_tokens=cut)
            assert text.count("\ufffd") <= 1 and run["text"].startswith(text.rstrip("\ufffd"))


def test_chat(server: Server) -> None:
    case = need(server, "chat", "runs")
    choice = server.post("chat/completions", **case["chat"])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (case["runs"][0]["text"], "stop")


def test_stop_strings(server: Server) -> None:
    case = need(server, "stops", "runs")
    (run,) = case["runs"]
    for stop, text in case["stops"].items():
        assert server.complete(prompt=run["prompt_ids"], stop=stop) == (text, "stop"), stop
    first = min((run["text"].index(stop), stop) for stop in case["stops"] if stop in run["text"] and len(stop) > 1)
    assert server.complete(prompt=run["prompt_ids"], stop=[first[1], "KLM"])[0] == run["text"][: first[0]]


def test_exact_fit(server: Server) -> None:
    need(server, "exact_fit")
    (run,) = server.case["runs"]
    ids = (run["prompt_ids"] * 11)[:64]
    for prompt, more in ((48, 16), (63, 1)):
        answer = server.post("completions", prompt=ids[:prompt], max_tokens=more, temperature=0)
        assert answer["usage"]["completion_tokens"] == more and answer["choices"][0]["finish_reason"] == "length"
    server.post("completions", 400, prompt=ids, max_tokens=1)
    for too_many in (17, 10**18, 2**31 - 1):
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": ids[:48], "max_tokens": too_many}, timeout=60
        )
        fits = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 16
        assert fits or (answer.status_code == 400 and "64" in answer.text)
    for wrong in (-1, "5"):
        server.post("completions", 400, prompt=ids[:4], max_tokens=wrong)


def test_template(server: Server) -> None:
    case = need(server, "messages", "rendered")
    messages = json.loads(json.dumps(case["messages"]))
    for message in messages:
        for call in message.get("tool_calls", []):  # a JSON string over the API
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    answer = server.post("chat/completions", messages=messages, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(case["ids"])
    refused = server.post("chat/completions", case["error_status"], messages=case["error_messages"])
    assert case["error_contains"] in json.dumps(refused)


def test_without_a_template(server: Server) -> None:
    if "no chat template" not in server.case["why"]:
        pytest.skip("this model has a template")
    assert "template" in json.dumps(server.post("chat/completions", 400, messages=USER)).lower()
    assert server.complete(prompt=server.case["runs"][0]["prompt_ids"])[0] == server.case["runs"][0]["text"]


def draws(server: Server, count: int, **body: Any) -> Counter[str]:
    ids = server.case["prompt_ids"]
    found: Counter[str] = Counter()
    for _ in range(0, count, BATCH):
        answer = server.post("completions", prompt=[ids] * min(BATCH, count), max_tokens=1, **body)
        found.update(choice["text"] for choice in answer["choices"])
    return found


def test_distributions(server: Server) -> None:
    case = need(server, "sampling")
    for row in case["sampling"]:
        found = draws(server, DRAWS, **{"temperature": 1, **row["params"]})
        wanted = row["probabilities"]
        assert found.keys() <= wanted.keys(), row
        chi = sum((found[letter] - DRAWS * p) ** 2 / (DRAWS * p) for letter, p in wanted.items())
        assert len(wanted) == 1 or chi <= CHI_SQUARE[len(wanted) - 1], f"{row}: {found}"


def test_exact_answers(server: Server) -> None:
    case = need(server, "exact")
    for row in case["exact"]:
        body, answer = row["params"], row.get("answer", "")
        if answer.startswith("400"):
            reply = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": case["prompt_ids"], "max_tokens": 1, **body}, timeout=60
            )
            assert reply.status_code in ((400, 200) if "ignored" in answer else (400,)), row
        elif answer in case["ids"]:
            assert draws(server, 10, **body) == {answer: 10}, row
        elif answer.startswith("text A"):
            (choice,) = server.post("completions", prompt=case["prompt_ids"], max_tokens=1, **body)["choices"]
            assert choice["text"] == "A"
        elif answer.startswith("A, or a 400"):
            reply = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": case["prompt_ids"], "max_tokens": 1, **body}, timeout=60
            )
            assert reply.status_code == 400 or reply.json()["choices"][0]["text"] == "A", row
        else:
            assert row["same_as"] == {}, row
            assert len(draws(server, 300, **body)) >= 4, row  # all five letters may come: nothing was cut


def test_log_probabilities(server: Server) -> None:
    """Raw ones: of the model, before temperature and truncation."""
    case = need(server, "logprobs")
    body = {"prompt": case["prompt_ids"], "max_tokens": 1, "temperature": 0, "logprobs": 5}
    (top,) = server.post("completions", **body)["choices"][0]["logprobs"]["top_logprobs"]
    for letter, value in case["logprobs"].items():
        assert math.isclose(top[letter], value, abs_tol=1e-3), letter
