"""The API process's end of the engine: starts the process, sends requests, routes tokens back.

One unix socket in a folder of mode 0700 joins the two. The reader never waits for a consumer: tokens of
a slow one collect in its own `EngineStream` (bounded by its max_tokens) while the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from atlas.config import EngineConfig
from atlas.engine import messages
from atlas.engine.connection import EngineConnection
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.errors import AtlasError

logger = logging.getLogger("atlas.engine.client")

ENGINE_COMMAND = (sys.executable, "-m", "atlas.engine")
CONNECT_TIMEOUT = 120.0
"""Seconds for the engine process to import itself and connect. Loading weights comes after, without limit."""

SOCKET_NAME = "engine.sock"
MAX_SOCKET_PATH = 103
"""Bytes that `sockaddr_un` holds on every supported system (104 with the final zero on macOS)."""

PATIENCE = 300.0
"""Seconds without progress after which an engine counts as hung: a step of many prompt tokens takes long on a CPU."""

_SIGTERM_GRACE = 0.7
_READ_ALL_SECONDS = 5.0
"""How long what a dead engine has written may take to be read, where its socket has no end: a child may have it."""

_LOOKS = 8
"""How often within its patience the client looks for progress. Looks are counted and not seconds: while this process
itself stands still (a suspended machine, a debugger) there are none."""


class EngineUnavailableError(AtlasError):
    """The engine does not serve: it is loading, shutting down or dead. HTTP 503, never 400."""


class EngineStream:
    """The outputs of one request, as an async iterator that ends after a finish reason.

    Outputs that are ready together arrive as one. `close` aborts the request unless it has finished;
    use it as a context manager, so that a consumer that goes away frees its sequence.
    """

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self.request_id = request_id
        self._client = client
        self._pending: list[SequenceOutput] = []
        self._waiting: asyncio.Future[None] | None = None
        self._finished = False

    def push(self, output: SequenceOutput) -> None:
        """Called by the client's reader; never blocks."""
        self._pending.append(output)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> SequenceOutput:
        if self._finished:
            raise StopAsyncIteration
        if not self._pending:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        output = SequenceOutput.join(self._pending)
        self._pending.clear()
        self._finished = output.finish_reason is not None
        return output

    def abort(self, error: str) -> None:
        """End the request, in the engine too, if it still runs: what has come is read, and then a reason "abort"."""
        if self._client.forget(self.request_id):
            self.push(SequenceOutput(self.request_id, [], "abort", error))

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent; does not wait."""
        self._finished = True
        self._client.forget(self.request_id)

    def __enter__(self) -> EngineStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineClient:
    """Owns the engine process for its whole life. All methods belong to one event loop.

    Args:
        config: sent to the engine as the first message.
        command: the program to start; `--socket PATH` is appended to it.
        environment: variables that it gets beside those of this process.
        patience: seconds after which a ready engine that makes no progress is dead: it neither answers, nor takes
            steps although it has requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        environment: Mapping[str, str] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.state: Literal["loading", "ready", "dead"] = "loading"
        self.stage = "starting the engine process"
        self.reason = ""
        self.ready: messages.Ready | None = None
        self.died = asyncio.Event()
        self._config = config
        self._command = tuple(command)
        self._environment = {**os.environ, **(environment or {})}
        self._patience = patience
        self._progress = True
        self._steps_seen = -1
        self._became_ready = asyncio.Event()
        self._connected, self._read_all = asyncio.Event(), asyncio.Event()
        self._streams: dict[str, EngineStream] = {}
        self._stats: deque[asyncio.Future[messages.Stats]] = deque()
        self._ids = itertools.count(1)
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._connection: EngineConnection | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Requests that have not finished."""
        return len(self._streams)

    async def start(self) -> None:
        """Start the process; returns at once, `wait_ready` waits for the weights."""
        self._folder = _make_folder()
        path = self._folder / SOCKET_NAME
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: EngineConnection(self._on_connect, self._receive, self._on_end), path
        )
        # Its own session: Ctrl-C in a terminal must reach this process only, which then drains the engine.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            "--socket",
            str(path),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=self._environment,
        )
        self._spawn(self._watch_process(self._process))
        self._spawn(self._watch_connect())

    async def wait_ready(self) -> messages.Ready:
        """The engine's own description, once it serves. Raises EngineUnavailableError if it dies before."""
        waits = [asyncio.ensure_future(self._became_ready.wait()), asyncio.ensure_future(self.died.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.state == "dead" or self.ready is None:
            raise EngineUnavailableError("engine", self.reason)
        return self.ready

    def submit(self, prompt: list[int], sampling: SamplingParams) -> EngineStream:
        """Queue one sequence. Raises EngineUnavailableError unless the engine is ready."""
        if self.state != "ready":
            found = self.reason if self.state == "dead" else f"not ready yet ({self.stage})"
            raise EngineUnavailableError("engine", found)
        stream = EngineStream(self, f"r{next(self._ids)}")
        self._send(messages.Submit(stream.request_id, prompt, sampling))
        self._streams[stream.request_id] = stream
        return stream

    def forget(self, request_id: str) -> bool:
        """Abort a request whose consumer went away. False, and nothing happens, if it has finished."""
        if self._streams.pop(request_id, None) is None:
            return False
        if self.state == "ready":
            self._send(messages.Abort(request_id))
        return True

    def fail_all(self, error: str) -> None:
        """End every running request with reason "abort" and `error`, in the engine too."""
        for stream in list(self._streams.values()):
            stream.abort(error)

    async def stats(self, timeout: float = 5.0) -> messages.Stats:
        """A snapshot between two steps. Raises EngineUnavailableError, also when no answer comes in time."""
        if self.state != "ready":
            raise EngineUnavailableError("engine", self.reason or f"not ready yet ({self.stage})")
        try:
            return await asyncio.wait_for(self._ask(), timeout)
        except TimeoutError:
            raise EngineUnavailableError("engine", f"no answer within {timeout:g} s") from None

    def _ask(self) -> asyncio.Future[messages.Stats]:
        """The answer to one GetStats."""
        future: asyncio.Future[messages.Stats] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._send(messages.GetStats())
        return future

    async def shutdown(self, grace: float = 3.0) -> None:
        """End the process: ask, and after `grace` seconds kill. Removes the socket folder. Idempotent."""
        was_ready = self.state == "ready"
        if was_ready:
            self._send(messages.Shutdown())
        self._die("shut down")
        process = self._process
        # While it loads it does not read messages, so waiting would only cost the grace.
        if process is not None and not (was_ready and await _exits(process, grace)):
            self._signal(signal.SIGTERM)
            if not await _exits(process, _SIGTERM_GRACE):
                self._signal(signal.SIGKILL)
                await process.wait()
        await self._cleanup()

    def kill(self) -> None:
        """The last resort, without an event loop: kill the process and remove the folder now."""
        self._signal(signal.SIGKILL)
        self._remove_folder()

    # ---- the connection ------------------------------------------------------------------------

    def _on_connect(self, connection: EngineConnection) -> None:
        if self._connection is not None or self.state == "dead":
            connection.close()
            return
        self._connection = connection
        # The connection stands; without the path nobody else can connect, and nothing is left behind
        # even if this process is killed.
        self._remove_folder()
        self._connected.set()
        self.stage = "loading"
        self._send(messages.Configure(self._config))

    def _on_end(self, fault: str | None) -> None:
        self._read_all.set()
        if fault is not None:
            self._die(fault)
        elif not self.died.is_set():
            # The exit code tells more than the closed socket, but the requests must not wait for it.
            self._end_service("the engine process ended unexpectedly")
            self._spawn(self._await_exit())

    async def _await_exit(self) -> None:
        if self._process is not None and await _exits(self._process, 1.0):
            self._die(_exit_reason(self._process))
        self._die("the engine process closed its connection")

    def _receive(self, message: messages.FromEngine) -> None:
        if type(message) is messages.StepOutput:
            self._progress = True
            for output in message.outputs:
                stream = self._streams.get(output.request_id)
                if stream is None:
                    continue  # aborted a moment ago
                if output.finish_reason is not None:
                    del self._streams[output.request_id]
                stream.push(output)
            return
        match message:
            case messages.Loading(stage):
                self.stage = stage
            case messages.Ready():
                self.ready, self.state, self.stage = message, "ready", "ready"
                self._became_ready.set()
                self._spawn(self._watch_progress())
            case messages.Stats():
                idle = not message.running and not message.waiting
                self._progress = self._progress or idle or message.steps != self._steps_seen
                self._steps_seen = message.steps
                if self._stats:
                    future = self._stats.popleft()
                    if not future.done():
                        future.set_result(message)
            case messages.Fatal(error):
                self._die(error)

    def _send(self, message: messages.ToEngine) -> None:
        if self._connection is None:
            return
        frame = messages.encode(message)
        if len(frame) - messages.LENGTH.size > messages.MAX_MESSAGE_BYTES:
            raise EngineUnavailableError(
                "engine", f"a message of {len(frame)} bytes", f"at most {messages.MAX_MESSAGE_BYTES}"
            )
        self._connection.write(frame)  # where it has ended, `_die` fails every request

    # ---- the end -------------------------------------------------------------------------------

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        # What the engine said last (tokens, a Fatal that names the cause) may still be in the socket, before its end.
        if self._connection is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._read_all.wait(), _READ_ALL_SECONDS)
        self._die(_exit_reason(process))

    async def _watch_connect(self) -> None:
        try:
            await asyncio.wait_for(self._connected.wait(), CONNECT_TIMEOUT)
        except TimeoutError:
            self._die(f"the engine process did not connect within {CONNECT_TIMEOUT:g} s")

    async def _watch_progress(self) -> None:
        """Ask now and then, and end an engine that hangs: it would hold its requests, and its place, for ever."""
        silent = 0
        while silent < _LOOKS:
            await asyncio.sleep(self._patience / _LOOKS)
            silent = 0 if self._progress else silent + 1
            self._progress = False
            self._ask()
        self._die(f"the engine made no progress for {self._patience:g} s; it was ended")

    def _end_service(self, reason: str) -> None:
        """No more requests, and an error for those that run."""
        self.state, self.stage, self.reason = "dead", "dead", reason
        self._fail_pending(reason)

    def _fail_pending(self, reason: str) -> None:
        for request_id, stream in self._streams.items():
            stream.push(SequenceOutput(request_id, [], "error", f"engine: {reason}"))
        self._streams.clear()
        while self._stats:
            future = self._stats.popleft()
            if not future.done():
                future.set_exception(EngineUnavailableError("engine", reason))
                future.exception()  # nobody may be waiting for it

    def _die(self, reason: str) -> None:
        """Final and idempotent: the first reason stays."""
        if not self.died.is_set():
            self._end_service(reason)
            self.died.set()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)  # the session it leads, so that its helpers go too

    async def _cleanup(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._connection is not None:
            self._connection.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _make_folder() -> Path:
    """A fresh folder of mode 0700, where the socket's path is short enough for the kernel."""
    folder = Path(tempfile.mkdtemp(prefix="atlas-"))  # mkdtemp makes it 0700
    if len(os.fsencode(folder / SOCKET_NAME)) > MAX_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="atlas-", dir="/tmp"))
    return folder


async def _exits(process: asyncio.subprocess.Process, timeout: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), timeout)
        return True
    return False


def _exit_reason(process: asyncio.subprocess.Process) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"the engine process was killed by {signal.Signals(-code).name}"
    return f"the engine process exited with code {code}"
