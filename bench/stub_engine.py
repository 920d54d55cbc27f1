"""An engine without a model, for bench/api_overhead.py: tokens at a set rate, and when it sent them.

    python -m bench.stub_engine serve STREAMS RATE TEXT TIMES [FLAGS] MODEL    the server on this engine
    python -m bench.stub_engine engine STREAMS RATE TEXT TIMES --socket PATH   the engine itself

It waits for STREAMS requests, then makes steps that give each of them one token, RATE tokens a second in all, whether
or not anybody keeps up: the bytes of the file TEXT. TIMES gets the `perf_counter` of every step once all is sent.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

from atlas.engine import messages
from atlas.engine.messages import Ready, SequenceOutput, Shutdown, Stats, StepOutput, Submit

FIRST_BYTE_ID = 7
"""Of the tokenizer that spells bytes (tests/serve/serve_harness.py)."""
MAX_CONTEXT = 100_000


def engine(streams: int, rate: float, text: bytes, times: Path, path: str) -> None:
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
            taken = _round(connection, waiting, streams / rate, text)
            times.with_suffix(".new").write_text("\n".join(map(str, taken)))
            times.with_suffix(".new").rename(times)
            waiting.clear()


def _round(connection: socket.socket, requests: list[Submit], period: float, text: bytes) -> list[float]:
    names = [request.request_id for request in requests]

    def frame(byte: int, reason: messages.FinishReason | None = None) -> bytes:
        return messages.encode(StepOutput([SequenceOutput(name, [FIRST_BYTE_ID + byte], reason) for name in names]))

    made = {byte: frame(byte) for byte in set(text)}
    taken, due = [], time.perf_counter() + 0.05
    for one in [*(made[byte] for byte in text[:-1]), frame(text[-1], "length")]:
        if (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        taken.append(time.perf_counter())
        connection.sendall(one)
        due += period
    return taken


def main() -> int:
    what, streams, rate, text, times, *rest = sys.argv[1:]
    if what == "engine":
        engine(int(streams), float(rate), Path(text).read_bytes(), Path(times), rest[-1])
        return 0
    from atlas.serve.__main__ import main as serve

    command = [sys.executable, "-m", "bench.stub_engine", "engine", streams, rate, text, times]
    return serve(rest, engine_command=command)


if __name__ == "__main__":
    sys.exit(main())
