"""Clients that ask for much at once, beside one that asks for little: it gets its answers, and in time.

`pytest -m exhaustive tests/serve/test_hostile_clients.py`: five seconds for each kind. Times are far above what a quiet
machine takes (the median alone: 4 ms, beside most of them 10 to 50), and far below what they were: seconds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_harness import RunningServer, behaviour, make_checkpoint

from atlas.serve.http import MAX_BODY

SECONDS = 4.0
U = {"role": "user", "content": "yo"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def filled(begin: bytes, unit: bytes, end: bytes, size: int = MAX_BODY) -> bytes:
    """A body of about so many bytes."""
    return begin + unit * ((size - len(begin) - len(end)) // len(unit)) + end


def said(**body: Any) -> bytes:
    return json.dumps(body).encode()


def tools(count: int, fields: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(fields)}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]


REPEATED = [{"type": "function", "name": "f", "parameters": {"description": "x" * (20 << 20)}}]
ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "lists": (CHAT, lambda: filled(b'{"messages":[],"x":[', b"[],", b"1]}")),
    "some lists": (CHAT, lambda: b'{"messages":[],"x":[' + b"[]," * 130_000 + b"1]}"),
    "strings": (CHAT, lambda: filled(b'{"messages":[],"x":[', b'"a",', b"1]}")),
    "numbers": (COMPLETIONS, lambda: filled(b'{"prompt":[', b"11,", b"1]}")),
    "nested": (CHAT, lambda: b'{"messages":[],"x":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    "text": (CHAT, lambda: said(messages=[{"role": "user", "content": "a b " * 8_000_000}])),
    "messages": (CHAT, lambda: said(messages=[U] * 26_000)),
    "items": (RESPONSES, lambda: said(input=[U] * 15_000, truncation="auto")),
    "tools": (CHAT, lambda: said(messages=[U], tools=tools(100, 100))),
    "biases": (CHAT, lambda: said(messages=[U], n=128, logit_bias={str(i): 1 for i in range(65_000)})),
    "choices": (CHAT, lambda: said(messages=[{"role": "user", "content": "x" * 100_000}], n=128)),
    "long texts": ("/tokenize", lambda: said(prompt="é x" * 1_000_000)),
    "texts to embed": ("/v1/embeddings", lambda: said(input=["yo"] * 2048)),
    "repeated tools": (
        RESPONSES,
        lambda: said(input="hi", tools=REPEATED, tool_choice="none", background=True, stream=True, seed=2),
    ),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    keys = tmp_path / "keys"
    keys.write_text("sk-hostile\nsk-polite\n")
    keys.chmod(0o600)
    script = {
        "default": behaviour("abc"),
        "behaviours": {"2": behaviour("uvw", end=None, delay=0.25)},
        "max_context": 131_072,
        "vocab_size": 150_000,
    }
    server = RunningServer(tmp_path, script, make_checkpoint(tmp_path / "tiny"), "--api-key-file", str(keys))
    deadline = time.monotonic() + 20
    while server.health() != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    yield server
    server.close()


def attack(port: int, request: bytes, until: float, answered: list[bytes]) -> None:
    """Send it again and again, and read what the answer begins with."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(request)
            answered.append(connection.recv(12))


def peak_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ATTACKS)
def test_a_polite_client_beside_others(server: RunningServer, name: str) -> None:
    path, make = ATTACKS[name]
    body = make()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-hostile\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    until, answered = time.monotonic() + SECONDS + 1, list[bytes]()
    threads = [
        threading.Thread(target=attack, args=(server.port, head.encode() + body, until, answered), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1)
    took: dict[str, list[float]] = {"small": [], "larger": []}
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer sk-polite"}, timeout=30) as client:
        while time.monotonic() < until:
            for size, more in (("small", ""), ("larger", "x" * 12_000)):
                began = time.monotonic()
                answer = client.post(CHAT, json={"messages": [U], "unknown": more})
                took[size].append(time.monotonic() - began)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["message"]["content"] == "abc"
    for thread in threads:
        thread.join(30)
    medians = {size: statistics.median(times) for size, times in took.items()}
    peak = peak_megabytes(server.process.pid)
    print(
        f"{name}: {medians}, the longest {max(map(max, took.values())):.2f} s; {len(answered)} answers, {peak:.0f} MB"
    )
    assert answered and set(answered) <= {b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 429"}
    assert max(medians.values()) < 0.5 and peak < 2000
    assert "Traceback" not in server.output.read_text()
