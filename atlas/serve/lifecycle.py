"""The server's life: bind, answer /health while loading, serve, drain, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

import atlas
from atlas import logs
from atlas.config import Origin, ServeConfig
from atlas.engine.client import ENGINE_COMMAND, EngineClient, EngineUnavailableError
from atlas.engine.messages import Ready
from atlas.errors import AtlasError
from atlas.serve.access import connections
from atlas.serve.app import create_app
from atlas.serve.bind import is_everywhere, url_of
from atlas.serve.frontend import Frontend
from atlas.serve.offload import Offload
from atlas.serve.resolve import resolve
from atlas.serve.service import Service, Serving
from atlas.serve.telemetry.traces import Traces

logger = logging.getLogger("atlas.serve")

DEATH_GRACE = 2.0
"""Seconds for which /health still says "dead" after the engine died, so that a probe sees why."""

_CLOSING_SECONDS = 0.5
_SWITCH_SECONDS = 0.0005
"""How long a thread that prepares a request keeps the interpreter before the event loop may have it, each time that it
wants it. With Python's own 5 ms and two threads that render 50,000 messages each, a small request took 177 ms at the
median, with this 14, and the threads were no slower."""


def _in_short(origin: Origin) -> str:
    """Name, value and source; reasons are for --print-config and /server_info."""
    value = "unset" if origin.value is None else origin.value
    return f"{origin.name} {value} ({re.split('[:;] ', origin.origin)[0]})"


class _Http(uvicorn.Server):
    """uvicorn without its signal handling: a shutdown drains the engine's streams first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One run of the server on a bound socket. `run` returns the exit code.

    An engine that dies is started again (`--engine-restarts`) while HTTP goes on: /health and new requests say 503.

    Args:
        origins: where each setting came from.
        keys: digests of the API keys; none: requests need no key.
        engine_command: program of the engine process.
        load_frontend: reads tokenizer and template of a checkpoint.
    """

    def __init__(
        self,
        config: ServeConfig,
        listener: socket.socket,
        origins: Sequence[Origin] = (),
        *,
        keys: Collection[bytes] = (),
        engine_command: Sequence[str] = ENGINE_COMMAND,
        load_frontend: Callable[[Path, ServeConfig, Sequence[Origin]], Frontend] = Frontend.load,
        started: float | None = None,
    ) -> None:
        self._config, self._listener, self._has_keys = config, listener, bool(keys)
        self._engine_command, self._load_frontend = engine_command, load_frontend
        self._started = time.perf_counter() if started is None else started
        self._service = Service(config, origins)
        self._traces = None
        if config.otlp_traces_endpoint is not None:
            self._traces = Traces(config.otlp_traces_endpoint, config.model_name)
            self._service.finished.append(self._traces)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        connections.limit_writes(listener, config.write_timeout)
        connections.raise_file_limit()
        self._http = _Http(
            uvicorn.Config(
                create_app(self._service, keys, (config.host, str(listener.getsockname()[0]))),
                http=connections.http_protocol(),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # What a client writes into X-Forwarded-* decides nothing.
                proxy_headers=False,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=1,
            )
        )

    async def run(self) -> int:
        """Serve until a signal (0), the engine's death or a failed start (1)."""
        loop = asyncio.get_running_loop()
        sys.setswitchinterval(_SWITCH_SECONDS)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        stop = asyncio.create_task(self._stop.wait())
        start = asyncio.create_task(self._start())
        code = 0
        try:
            await asyncio.wait((start, stop, http), return_when=asyncio.FIRST_COMPLETED)
            if http.done():
                http.result()  # it never ends by itself but by an error
            if not self._stop.is_set():
                code = await self._serve(start.result(), stop)
        except AtlasError as error:
            logger.error("%s", error)
            code = 1
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            await self._shut_down(http)
            stop.cancel()
        return code

    # ---- start ---------------------------------------------------------------------------------

    async def _start(self) -> Path:
        """Load everything; the engine reads weights while this process reads the small files. Returns the path."""
        service, config = self._service, self._config
        ledger = [("start", time.perf_counter() - self._started)]
        service.stage, began = "finding the model", time.perf_counter()
        path = await resolve(config.model, offline=config.offline)
        ledger.append(("model", time.perf_counter() - began))
        engine = await self._start_engine(path)
        began = time.perf_counter()
        frontend_task = asyncio.create_task(Offload(1).run(self._load_frontend, path, config, service.origins))
        ready_task = asyncio.create_task(engine.wait_ready())
        try:
            frontend, ready = await asyncio.gather(frontend_task, ready_task)
        finally:
            frontend_task.cancel()
            ready_task.cancel()
        ledger += ready.ledger
        ledger.append(("engine in all", time.perf_counter() - began))
        fingerprint = fingerprint_of(config, ready, frontend.weights_digest)
        service.serving = Serving(engine, frontend, ready, fingerprint)
        # What is loaded stays until the process ends: no answer waits while a full collection looks at it.
        gc.collect()
        gc.freeze()
        self._announce(ready, frontend, ledger)
        return path

    async def _start_engine(self, path: Path) -> EngineClient:
        """A new engine process, which has yet to load."""
        config = self._config
        engine = self._service.engine = EngineClient(
            config.engine(path),
            command=self._engine_command,
            environment=logs.environment(config.log_format),
            patience=config.engine_timeout,
        )
        await engine.start()
        return engine

    def _announce(self, ready: Ready, frontend: Frontend, ledger: list[tuple[str, float]]) -> None:
        total = time.perf_counter() - self._started
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in ledger)
        host, port = self._listener.getsockname()[:2]
        url = url_of(host, port, secure=self._config.ssl_certfile is not None)
        name = self._config.model_name
        if frontend.template is not None:
            path, body = (
                "chat/completions",
                {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50},
            )
        else:
            path, body = "completions", {"model": name, "prompt": "Hello", "max_tokens": 50}
        data = shlex.quote(msgspec.json.encode(body).decode())
        logger.info("backend %s, kernels %s: %s", ready.backend, ready.kernel_set, ready.reason)
        for what, origins in (
            ("answers", frontend.presets.origins),
            ("sampling defaults", frontend.presets.sampling_origins()),
        ):
            logger.info("%s: %s", what, ", ".join(map(_in_short, origins)))
        owners = ", ".join(f"{owner} {size / 1e6:.1f}" for owner, size in ready.memory)
        logger.info("memory in MB: %.1f, of it %s", sum(size for _, size in ready.memory) / 1e6, owners)
        if self._config.log_format == "json":
            fields = {"seconds": round(total, 3), "stages": dict(ledger), "model": name, "url": f"{url}/v1"}
            logger.info("ready in %.2f s", total, extra={"fields": fields})
            return
        key = ' -H "Authorization: Bearer $ATLAS_API_KEY"' if self._has_keys else ""
        lines = [f"ready in {total:.2f} s: {stages}", f"{name} (context {ready.max_context}) at {url}/v1"]
        if is_everywhere(host):
            lines.append("other machines use an address of this one instead, or a name given with --allowed-host")
        lines.append(f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {data}")
        # Unbuffered: a disk that is full, or a reader that is gone, is no reason not to serve, nor for an exit code of
        # the interpreter's, which empties its buffer at the end.
        with contextlib.suppress(OSError):
            os.write(1, "".join(f"{line}\n" for line in lines).encode())

    # ---- serve and stop --------------------------------------------------------------------------

    async def _serve(self, path: Path, stop: asyncio.Task[bool]) -> int:
        """Until a signal, or until the engine has died more often than it is started again."""
        service = self._service
        while True:
            engine = service.engine
            assert engine is not None
            await _first(engine.died.wait(), stop)
            if self._stop.is_set():
                await self._drain(engine)
                return 0
            if not service.restarts.take():
                service.restarting = None
                logger.error("the engine died: %s", engine.reason)
                await asyncio.wait((stop,), timeout=DEATH_GRACE)
                return 1
            logger.error("the engine died: %s; starting it again", engine.reason)
            service.restarting = engine.reason
            service.metrics.restarts.add(1)
            await _first(self._restart(engine, path), stop)

    async def _restart(self, dead: EngineClient, path: Path) -> None:
        """Replace a dead engine. One that dies while it loads is for `_serve` to see."""
        began, service = time.perf_counter(), self._service
        await dead.shutdown(grace=0.0)
        engine = await self._start_engine(path)
        with contextlib.suppress(EngineUnavailableError):
            ready = await engine.wait_ready()
            assert service.serving is not None
            service.serving = msgspec.structs.replace(service.serving, engine=engine, ready=ready)
            service.restarting = None
            logger.info("the engine serves again after %.2f s", time.perf_counter() - began)

    async def _drain(self, engine: EngineClient) -> None:
        self._service.draining = True
        if working := self._working:
            requests, limit = "request" if working == 1 else "requests", self._config.drain_timeout
            logger.info("finishing %d %s (at most %g s; a second Ctrl-C ends at once)", working, requests, limit)
        await self._quiet(self._config.drain_timeout)
        engine.fail_all("the server is shutting down")
        await self._quiet(_CLOSING_SECONDS, hurried=True)

    @property
    def _working(self) -> int:
        """Requests under way, and responses in the background, which others may be following."""
        return self._service.active + len(self._service.background)

    async def _quiet(self, timeout: float, *, hurried: bool = False) -> None:
        """Wait until no request is under way; not longer than `timeout`, nor after a second signal."""
        deadline = time.monotonic() + timeout
        while self._working and time.monotonic() < deadline and (hurried or not self._hurry.is_set()):
            await asyncio.sleep(0.02)

    async def _shut_down(self, http: asyncio.Task[None]) -> None:
        self._service.draining = True
        self._http.should_exit = True
        closing = [http]
        engine = self._service.engine
        if engine is not None:
            closing.append(asyncio.create_task(engine.shutdown(grace=0.8)))
        await asyncio.gather(*closing, return_exceptions=True)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        # Asked twice: stop waiting for streams, and do not depend on anything that may hang.
        self._hurry.set()
        asyncio.get_running_loop().call_later(1.0, self._exit_now)

    def _exit_now(self) -> None:
        if self._service.engine is not None:
            self._service.engine.kill()
        os._exit(0)


async def _first(work: Coroutine[Any, Any, Any], stop: asyncio.Task[Any]) -> None:
    """Until `work` is done, or cancelled because `stop` was."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def fingerprint_of(config: ServeConfig, ready: Ready, weights_digest: str) -> str:
    """`system_fingerprint`: what an answer depends on beside its request. The same for equal weights under any name,
    another for other kernels, another quantization or another version of Atlas."""
    how = (config.quant or "", config.kv_dtype or "")
    parts = (atlas.__version__, ready.backend, ready.kernel_set, *how, weights_digest)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
