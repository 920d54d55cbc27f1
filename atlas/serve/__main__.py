"""`python -m atlas.serve [MODEL]`: serve a model over the OpenAI and Anthropic APIs."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

from atlas import installed, logs
from atlas.api_keys import load_keys
from atlas.config import LoadedConfig, Origin, describe, load
from atlas.engine.client import ENGINE_COMMAND
from atlas.errors import AtlasError


def main(argv: Sequence[str], *, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """The exit code: 0 after a signal, 1 when start or engine failed, 2 for wrong settings."""
    started = time.perf_counter()
    try:
        loaded = load(argv)
        if loaded.print_config:
            # What the model makes of "auto" stands in the place of it.
            print(describe([*{o.name: o for o in (*loaded.origins, *_of_model(loaded))}.values()]))
            return 0
        return _run(loaded, started, engine_command)
    except AtlasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _of_model(loaded: LoadedConfig) -> Sequence[Origin]:
    """What requests get for fields they leave out; the model decides, so its files have to be here."""
    from atlas.serve.frontend import Frontend
    from atlas.serve.resolve import resolve_here

    try:
        path = resolve_here(loaded.config.model, True)
    except AtlasError as error:
        return [Origin("sampling defaults", None, f"not known without the model's files: {error}")]
    presets = Frontend.load(path, loaded.config, loaded.origins).presets
    return [*presets.origins, *presets.sampling_origins()]


def _run(loaded: LoadedConfig, started: float, engine_command: Sequence[str]) -> int:
    config = loaded.config
    logs.configure(config.log_level, config.log_format, "api")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if (difference := installed.difference(os.environ)) is not None:
        logging.getLogger("atlas.serve").warning("%s", difference)
    # First of all, so that a port in use is told before anything slow: these imports, then the weights.
    from atlas.serve.access.tls import check_tls
    from atlas.serve.bind import bind

    keys = load_keys(config.api_key, config.api_key_file)
    check_tls(config)
    with bind(config.host, config.port, has_keys=bool(keys), insecure=config.insecure) as listener:
        from atlas.serve.lifecycle import Server

        async def serve() -> int:
            server = Server(config, listener, loaded.origins, keys=keys, engine_command=engine_command, started=started)
            return await server.run()

        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            return runner.run(serve())


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed, else the standard library's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the server's own handling of it is in place
        sys.exit(130)
