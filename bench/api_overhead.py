"""What the server adds to an engine: `python -m bench.api_overhead [--profile FILE.svg]`.

A stub engine (stub_engine.py) emits tokens at a set rate, the real server makes HTTP of them, and a client of its own
process, that does little more than read sockets, counts what arrives, and when. All three share two cores.

bench/results/api_overhead.json gets, for each way to ask: tokens a second with 128 streams of an engine that makes
30,000, the processor time of the API process for a token, how many tokens share an event, and how long after the engine
sent it a token arrives; the last for a single stream, too, and for a process that only passes bytes on. The best of
several rounds is kept: others who use the machine can only slow them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "api_overhead.json"
STREAMS, RATE = 128, 30_000
ONE_RATE, SLOW_RATE = 1000, 100
"""Tokens a second of the single stream: each finds an idle server. Those of a slow one find, on a machine that does
other work too, caches that hold something else."""

Row = dict[str, Any]

MARK = "~"
"""Stands nowhere in an answer but in its text, so a client counts tokens by counting it."""
Text = Callable[[int], str]
"""Of about so many tokens, each a byte."""


def plain(tokens: int) -> str:
    return MARK * tokens


def thought(tokens: int) -> str:
    return "<think>" + MARK * tokens


def call(tokens: int) -> str:
    """A tool call with many arguments, each of which is sent when it is whole."""
    arguments = ", ".join(f'"k{index:05}": "{MARK * 16}"' for index in range(tokens // 30))
    return f'<tool_call>\n{{"name": "f", "arguments": {{{arguments}}}}}\n</tool_call>'


PARSERS = ("--reasoning-parser", "think", "--tool-parser", "hermes")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEMPLATE_OF_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
ENDS = tuple(
    data + b"\n\n\r\n0\r\n\r\n"
    for data in (b"data: [DONE]", b'event: message_stop\ndata: {"type":"message_stop"}', b'"user":null}}')
)
"""How streams end, in chunks; the last is the end of a response."""
RESPONSES = "/v1/responses"
COPIES = {RESPONSES: 5}
"""How often a text stands in a stream, if not once: a response's again when its text, part, item and all have ended."""
CHAT = "/v1/chat/completions"
CASES: dict[str, tuple[str, dict[str, Any], Text, tuple[str, ...]]] = {
    # path, fields of the request, what the model says, flags
    "completions": ("/v1/completions", {"prompt": "x"}, plain, ()),
    "chat": (CHAT, {}, plain, ()),
    "messages": ("/v1/messages", {"model": "tiny"}, plain, ()),
    "responses": (RESPONSES, {"input": "x"}, plain, ()),
    "chat, stop string": (CHAT, {"stop": "END"}, plain, ()),
    "chat, content behind parsers": (CHAT, {"tools": TOOLS}, plain, PARSERS),
    "chat, reasoning": (CHAT, {"tools": TOOLS}, thought, PARSERS),
    "chat, arguments of a tool call": (CHAT, {"tools": TOOLS}, call, PARSERS),
}


# ---- the client: a process of its own ------------------------------------------------------------


def client(port: int, streams: int, path: str, body: str) -> None:
    """Ask `streams` times at once and read all. Prints what came, a line of JSON."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    mark, selector = MARK.encode(), selectors.EpollSelector()
    sockets = []
    for index in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        sockets.append(connection)
        selector.register(connection, selectors.EVENT_READ, index)
    counts, events, ends = [0] * streams, 0, [b""] * streams
    arrivals: list[tuple[int, float]] = []  # tokens of the stream so far, and when they were there
    for connection in sockets:
        connection.sendall(request)
    open_streams = streams
    while open_streams:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            now, index = time.perf_counter(), key.data
            if not data:
                selector.unregister(key.fileobj)
                open_streams -= 1
                continue
            if found := data.count(mark):
                counts[index] += found
                arrivals.append((counts[index], now))
            events += data.count(b"data: {")
            ends[index] = (ends[index] + data[-300:])[-300:]
    complete = all(end.endswith(ENDS) for end in ends)
    print(
        json.dumps(
            {"counts": counts, "events": events, "arrivals": arrivals, "complete": complete, "end": ends[0].decode()}
        )
    )


# ---- one round -----------------------------------------------------------------------------------


class Bench:
    """The server on the stub engine, for one case."""

    def __init__(self, case: str, streams: int, rate: int, seconds: float, model: Path, folder: Path) -> None:
        self.path, fields, make, flags = CASES[case]
        self.text = make(int(seconds * rate / streams))
        (folder / "text").write_text(self.text)
        said = {} if {"prompt", "input"} & fields.keys() else {"messages": [{"role": "user", "content": "x"}]}
        limit = "max_output_tokens" if self.path == RESPONSES else "max_tokens"
        self.fields = {**said, limit: len(self.text), **fields}
        self.streams, self.seconds, self.times = streams, seconds, folder / "times"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        arguments = ["serve", str(streams), str(rate), str(folder / "text"), str(self.times), "--port", str(self.port)]
        self.log = (folder / "log").open("wb")
        command = [sys.executable, "-m", "bench.stub_engine", *arguments, "--log-level", "warning", *flags, str(model)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=ROOT)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health") as response:
                    response.read()
                return
            except OSError:
                assert self.process.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
        raise TimeoutError("the server did not become ready")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self.log.close()

    def round(self, profile: Path | None = None) -> Row:
        """All streams once, from the first token to the last."""
        fields = {"stream": True, "temperature": 0, **self.fields}
        self.times.unlink(missing_ok=True)
        arguments = ["--client", str(self.port), str(self.streams), self.path, json.dumps(fields)]
        began, used = time.perf_counter(), _cpu(self.process.pid)
        asking = subprocess.Popen([sys.executable, "-m", "bench.api_overhead", *arguments], stdout=-1, cwd=ROOT)
        if profile is not None:
            time.sleep(1.0)
            command = [
                str(Path(sys.executable).with_name("py-spy")),
                "record",
                "-o",
                str(profile),
                "-d",
                str(int(self.seconds - 2)),
                "-r",
                "250",
                "-p",
            ]
            subprocess.run([*command, str(self.process.pid)], check=True, capture_output=True)
        answer = json.loads(asking.communicate()[0])
        used = _cpu(self.process.pid) - used
        assert answer["complete"], f"a stream did not end as it should: {answer['end']!r}"
        marks = [place for place, character in enumerate(self.text) if character == MARK]
        expected = len(marks) * COPIES.get(self.path, 1)
        assert answer["counts"] == [expected] * self.streams, "a stream has too few or too many tokens"
        while not self.times.exists():
            time.sleep(0.01)
        sent = [float(line) for line in self.times.read_text().split()]
        arrivals = [(count, now) for count, now in answer["arrivals"] if count <= len(marks)]
        took = arrivals[-1][1] - sent[0]
        lags = sorted(now - sent[marks[count - 1]] for count, now in arrivals)
        total = (marks[-1] + 1) * self.streams
        return {
            "tokens_per_s": round(total / took),
            "api_cpu_us_per_token": round(used / total * 1e6, 2),
            "tokens_per_event": round(total / answer["events"], 2),
            "added_latency_us": {"median": _us(lags, 0.5), "p99": _us(lags, 0.99)},
            "seconds": round(time.perf_counter() - began, 1),
        }


def _us(values: list[float], share: float) -> float:
    return round(values[min(len(values) - 1, int(share * len(values)))] * 1e6, 1)


def _cpu(pid: int) -> float:
    """Seconds of processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def relay(rate: int, rounds: int) -> float:
    """What bench/relay.py tells, the least of several."""
    command = [sys.executable, "-m", "bench.relay", str(rate), "2"]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout for _ in range(rounds)]
    return min(map(float, runs))


def measure(case: str, model: Path, rounds: int, seconds: float) -> Row:
    """One way to ask, with many streams and with one: of each the round that others disturbed least."""
    found: Row = {}
    loads = (
        (f"{STREAMS} streams", STREAMS, RATE, rounds),
        (f"1 stream, {ONE_RATE} tokens/s", 1, ONE_RATE, 4 * rounds),
        (f"1 stream, {SLOW_RATE} tokens/s", 1, SLOW_RATE, rounds),
    )
    for name, streams, rate, times in loads:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(case, streams, rate, seconds, model, Path(folder))
            try:
                runs = [bench.round() for _ in range(times)]
            finally:
                bench.close()
        found[name] = min(runs, key=lambda run: run["added_latency_us"]["median"])
        found[name]["of"] = {
            "tokens_per_s": [run["tokens_per_s"] for run in runs],
            "median_us": [run["added_latency_us"]["median"] for run in runs],
        }
    return found


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        port, streams, path, body = sys.argv[2:]
        client(int(port), int(streams), path, body)
        return
    parser = argparse.ArgumentParser(prog="python -m bench.api_overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", choices=CASES, help="only these; nothing is stored then")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--profile", type=Path, help="only a flame graph of the first case, by py-spy")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    from tests.serve.serve_harness import CHAT_TEMPLATE, make_checkpoint

    cases = arguments.case or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "tiny", chat_template=TEMPLATE_OF_TOOLS + CHAT_TEMPLATE)
        if arguments.profile:
            bench = Bench(cases[0], STREAMS, RATE, 12.0, model, Path(folder))
            try:
                print(bench.round(arguments.profile))
            finally:
                bench.close()
            return
        found = {}
        for case in cases:
            found[case] = measure(case, model, arguments.rounds, arguments.seconds)
            print(case, json.dumps(found[case]), flush=True)
    if arguments.case is None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        document = {
            "what": f"{STREAMS} streams of a stub engine of {RATE} tokens/s, and 1 stream, on two cores",
            "commit": commit.stdout.strip(),
            "machine": {"cpu": platform.processor() or platform.machine(), "cores_used": 2, "load": os.getloadavg()[0]},
            "python": platform.python_version(),
            "relay_us": {f"{rate} tokens/s": relay(rate, 4) for rate in (ONE_RATE, SLOW_RATE)},
            "cases": found,
        }
        RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
