"""The engine process: `python -m atlas.engine --socket PATH`, started by the API process.

Reads `Configure`, loads the model, answers `Ready`, then alternates between messages and steps. It
blocks on the socket only while it has nothing to compute, and never waits for a reader: what cannot
be sent yet stays in a buffer.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atlas import logs
from atlas.config import EngineConfig
from atlas.engine import messages
from atlas.errors import AtlasError, RequestError
from atlas.runtime.extension import start_driver

if TYPE_CHECKING:
    from atlas.engine.engine import Engine

_PR_SET_PDEATHSIG = 1
"""Of `prctl`: `linux/prctl.h`."""

_log = logging.getLogger("atlas.engine")


class Channel:
    """Framed messages over a non-blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._received = bytearray()
        self._unsent = bytearray()
        self.closed = False

    def send(self, message: messages.FromEngine) -> None:
        """Queue a message and send what the socket takes."""
        self._unsent += messages.encode(message)
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            del self._unsent[:sent]

    def receive(self, wait: bool) -> list[messages.ToEngine]:
        """Messages that have arrived; with `wait`, blocks until there is at least one or the peer is gone.

        Raises:
            msgspec.ValidationError, ValueError: the peer sent something that is no message.
        """
        while True:
            writers = [self._socket] if self._unsent else []
            readable, writable, _ = select.select([self._socket], writers, [], None if wait else 0.0)
            if writable:
                self._flush()
            if readable:
                self._read()
            received = self._decode()
            if received or self.closed or not wait:
                return received

    def _read(self) -> None:
        """Take everything that has arrived: between two steps is the only time, and an abort may stand last."""
        while not self.closed:
            try:
                data = self._socket.recv(1 << 20)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.closed = True
            self._received += data

    def _decode(self) -> list[messages.ToEngine]:
        result, position = [], 0
        header = messages.LENGTH.size
        while len(self._received) - position >= header:
            (length,) = messages.LENGTH.unpack_from(self._received, position)
            if length > messages.MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes; accepted: up to {messages.MAX_MESSAGE_BYTES}")
            if len(self._received) - position - header < length:
                break
            begin = position + header
            result.append(messages.decode_to_engine(bytes(self._received[begin : begin + length])))
            position = begin + length
        del self._received[:position]
        return result

    def drain(self, timeout: float) -> None:
        """Send what is still unsent, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._unsent and not self.closed and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._socket], [], left)
            self._flush()


def load(config: EngineConfig, channel: Channel) -> Engine:
    """Open the checkpoint and put it on a backend, reporting each stage."""
    channel.send(messages.Loading("open checkpoint"))
    started = time.perf_counter()
    # All else is imported here, beside the driver's start. NumPy alone takes longer than the socket takes to connect.
    start_driver(config.backend)
    from atlas.engine.engine import Engine
    from atlas.engine.grammar import compiler_of
    from atlas.runtime.progress import WeightsBar
    from atlas.runtime.runner import Runner, RunnerOptions
    from atlas.weights import open_checkpoint

    with open_checkpoint(Path(config.model)) as checkpoint:
        opened = time.perf_counter() - started

        def report(stage: str) -> None:
            channel.send(messages.Loading(stage))

        runner = Runner.load(checkpoint, RunnerOptions.of(config), report, WeightsBar(report))
    compiler, ledger = compiler_of(Path(config.model)), [("open checkpoint", opened), *runner.ledger]
    if config.prepare_grammars:
        report("grammars")
        began = time.perf_counter()
        compiler.prepare()
        ledger.append(("grammars", time.perf_counter() - began))
    channel.send(
        messages.Ready(
            backend=runner.backend.describe(),
            kernel_set=runner.choice.name,
            reason=runner.choice.reason,
            max_context=runner.max_context,
            vocab_size=runner.config.shape.vocab_size,
            ledger=ledger,
            memory=runner.memory,
            target=dict(zip(("hardware", "model", "quant"), runner.choice.target, strict=True)),
            embedding_size=runner.config.shape.hidden_size if runner.hidden is not None else 0,
        )
    )
    # What is loaded stays until the process ends: a full collection, which steps then wait for, need not look at it.
    gc.collect()
    gc.freeze()
    return Engine(runner, compiler)


def serve(channel: Channel, engine: Engine) -> None:
    """Messages and steps until the API process says so or goes away."""
    while not channel.closed:
        for message in channel.receive(wait=not engine.busy):
            match message:
                case messages.Submit(request_id=request_id, prompt=prompt, sampling=sampling):
                    try:
                        engine.add(request_id, prompt, sampling)
                    except RequestError as error:
                        output = messages.SequenceOutput(request_id, [], "error", str(error))
                        channel.send(messages.StepOutput([output]))
                case messages.Abort(request_id=request_id):
                    engine.abort(request_id)
                case messages.GetStats():
                    channel.send(engine.stats())
                case messages.Shutdown():
                    channel.drain(1.0)
                    return
        if engine.busy:
            outputs = engine.step()
            if outputs:
                channel.send(messages.StepOutput(outputs))


def _end_with_parent() -> None:
    """Have the system kill this process when the API process is killed. It would see its socket closed, but not while
    it hangs in a driver."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _leave_stopping_to_parent() -> None:
    """systemd stops a service by a signal to all of its processes, but what runs has to finish first: the API process
    says when. A hung engine, and one that still loads, it kills."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m atlas.engine", description=__doc__)
    parser.add_argument("--socket", required=True, help="unix socket of the API process")
    arguments = parser.parse_args()
    logs.configure(os.environ.get("ATLAS_LOG_LEVEL", "info"), os.environ.get(logs.FORMAT_VARIABLE, "text"), "engine")
    _end_with_parent()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(arguments.socket)  # fails where the parent is dead already
    channel = Channel(connection)
    try:
        received = channel.receive(wait=True)
        if not received:
            return 0
        if not isinstance(received[0], messages.Configure):
            raise ValueError(f"the first message is {type(received[0]).__name__}, accepted: Configure")
        engine = load(received[0].config, channel)
        _leave_stopping_to_parent()
        serve(channel, engine)
    except (AtlasError, msgspec.ValidationError, ValueError) as error:
        channel.send(messages.Fatal(str(error)))
        channel.drain(1.0)
        return 1
    except Exception as error:
        _log.exception("the engine failed")
        channel.send(messages.Fatal(f"internal error: {type(error).__name__}: {error}"))
        channel.drain(1.0)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
