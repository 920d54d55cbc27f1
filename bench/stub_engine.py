"""An engine without a model, for bench/api_overhead.py: tokens at a set rate, and when it sent them.

    python -m bench.stub_engine serve STREAMS RATE TIMES PREFIX [FLAGS] MODEL    the server on this engine
    python -m bench.stub_engine engine STREAMS RATE TIMES PREFIX --socket PATH   the engine itself

It waits for STREAMS requests, then makes steps that give each of them one token, RATE tokens a second in all, whether
or not anybody keeps up: those of PREFIX, then MARK without end. TIMES gets the `perf_counter` of every step once all
is sent.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

from atlas.engine import messages
from atlas.engine.messages import Ready, SequenceOutput, Shutdown, Stats, StepOutput, Submit

MARK = "~"
"""Stands nowhere else in an answer, so a client counts tokens by counting it."""
FIRST_BYTE_ID = 7
"""Of the tokenizer that spells bytes (tests/serve/serve_harness.py)."""
MAX_CONTEXT = 100_000


def engine(streams: int, rate: float, times: Path, prefix: str, path: str) -> None:
    """Rounds of STREAMS requests until the API process goes away."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    received = connection.makefile("rb")
    waiting: list[Submit] = []
    while header := received.read(messages.LENGTH.size):
        match messages.decode_to_engine(received.read(*messages.LENGTH.unpack(header))):
            case messages.Configure():
                ready = Ready("stub", "none", "a benchmark", MAX_CONTEXT, 320, [("nothing", 0.01)])
                connection.sendall(messages.encode(ready))
            case Submit() as request:
                waiting.append(request)
            case messages.GetStats():
                connection.sendall(messages.encode(Stats(0, 0, 1, 1, 0)))
            case Shutdown():
                return
        if len(waiting) == streams:
            taken = _round(connection, waiting, streams / rate, prefix)
            times.with_suffix(".new").write_text("\n".join(map(str, taken)))
            times.with_suffix(".new").rename(times)
            waiting.clear()


def _round(connection: socket.socket, requests: list[Submit], period: float, prefix: str) -> list[float]:
    names, steps = [request.request_id for request in requests], requests[0].sampling.max_tokens

    def frame(byte: int, reason: messages.FinishReason | None = None) -> bytes:
        return messages.encode(StepOutput([SequenceOutput(name, [FIRST_BYTE_ID + byte], reason) for name in names]))

    head, mark = [frame(byte) for byte in prefix.encode()], frame(ord(MARK))
    frames = [*head, *[mark] * (steps - len(head) - 1), frame(ord(MARK), "length")]
    taken, due = [], time.perf_counter() + 0.05
    for one in frames:
        if (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        taken.append(time.perf_counter())
        connection.sendall(one)
        due += period
    return taken


def main() -> int:
    what, streams, rate, times, prefix, *rest = sys.argv[1:]
    if what == "engine":
        engine(int(streams), float(rate), Path(times), prefix, rest[-1])
        return 0
    from atlas.serve.__main__ import main as serve

    command = [sys.executable, "-m", "bench.stub_engine", "engine", streams, rate, times, prefix]
    return serve(rest, engine_command=command)


if __name__ == "__main__":
    sys.exit(main())
