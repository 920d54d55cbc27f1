"""The least that a token's way can take: `python -m bench.relay RATE SECONDS` prints median microseconds.

Three processes as in bench/api_overhead.py, joined by the same kinds of sockets and the same event loop, of which the
one in the middle only passes on what it gets.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time
from functools import partial

import uvloop

_STAMP = struct.Struct("d")


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Until the source ends."""

    async def main() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        out, _ = await loop.create_connection(asyncio.Protocol, sock=target)

        class Relay(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                out.write(data)

            def connection_lost(self, error: Exception | None) -> None:
                ended.set()

        await loop.create_connection(Relay, sock=source)
        await ended.wait()
        out.close()

    uvloop.run(main())


def receive(source: socket.socket) -> None:
    """Print the median age of the stamps that arrive."""
    ages = []
    while stamp := source.recv(_STAMP.size, socket.MSG_WAITALL):
        ages.append(time.perf_counter() - _STAMP.unpack(stamp)[0])
    print(round(sorted(ages)[len(ages) // 2] * 1e6, 1), flush=True)


def main() -> None:
    rate, seconds = float(sys.argv[1]), float(sys.argv[2])
    near, far = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
    works = (partial(pass_on, far, served), (near, client)), (partial(receive, client), (near, far, served))
    for work, others in works:
        if os.fork() == 0:
            for end in others:
                end.close()
            work()
            os._exit(0)
    for end in (far, client, served):
        end.close()
    due = time.perf_counter() + 0.5
    for _ in range(int(rate * seconds)):
        due += 1 / rate
        if (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        near.send(_STAMP.pack(time.perf_counter()))
    near.close()
    for _ in range(2):
        os.wait()


if __name__ == "__main__":
    main()
