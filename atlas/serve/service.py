"""The state that the endpoints share: configuration, engine, model, and whether requests are taken."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import msgspec

from atlas.config import Origin, ServeConfig
from atlas.engine.client import EngineClient
from atlas.engine.messages import Ready
from atlas.serve.errors import ApiError, unavailable, unknown
from atlas.serve.frontend import Frontend
from atlas.serve.openai.response_store import MemoryStore, ResponseStore
from atlas.serve.openai.responses_background import Background
from atlas.serve.reference.unknown_fields import MAX_REPORTED, Unread, general_path
from atlas.serve.restarts import Restarts
from atlas.serve.telemetry.engine_watch import EngineWatch
from atlas.serve.telemetry.metrics import Metrics
from atlas.serve.telemetry.tracking import Record

logger = logging.getLogger("atlas.serve")


class Serving(msgspec.Struct, frozen=True):
    """Everything that exists once requests can be answered."""

    engine: EngineClient
    frontend: Frontend
    ready: Ready
    fingerprint: str


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """GET /health."""

    status: str
    stage: str | None = None
    reason: str | None = None


class Service:
    """One server. `serving` is set when it is ready; `active` counts requests under way.

    origins: where each value of `config` came from.  finished: called with the record of every request that ended.
    """

    def __init__(self, config: ServeConfig, origins: Sequence[Origin] = ()) -> None:
        self.config, self.origins = config, origins
        self.metrics = Metrics()
        self.engine_watch = EngineWatch()
        self.restarts = Restarts(config.engine_restarts)
        self.restarting: str | None = None  # why the last engine died, until the next one serves
        self.finished: list[Callable[[Record], None]] = []
        self.responses: ResponseStore = MemoryStore(config.max_responses, config.response_memory)
        self.background = Background()
        self.created = int(time.time())
        self.engine: EngineClient | None = None
        self.serving: Serving | None = None
        self.stage = "starting"
        self.draining = False
        self.active = 0
        self._reported: set[str] = set()

    def require(self) -> Serving:
        """What answers requests. Raises ApiError 503 while there is nothing."""
        health = self.health()
        if self.serving is None or health.status != "ok":
            detail = health.reason or health.stage
            message = f"the server is {health.status}" + (f": {detail}" if detail else "")
            raise unavailable(f"server_{health.status.replace(' ', '_')}", message, self.retry_after())
        return self.serving

    def health(self) -> Health:
        """ok, loading, restarting (the engine died), dead or shutting down."""
        if self.draining:
            return Health("shutting down")
        engine = self.engine
        if engine is not None and engine.state == "dead":
            # Whoever starts it again has not got to it yet. An engine that never served is not started again.
            again = self.restarting is not None or (self.serving is not None and self.restarts.left > 0)
            return Health("restarting" if again else "dead", reason=engine.reason)
        if self.serving is None:
            loading = engine is not None and engine.state == "loading"
            return Health("loading", stage=engine.stage if loading and engine else self.stage)
        if self.restarting is not None:
            return Health("restarting", stage=engine.stage if engine else None, reason=self.restarting)
        return Health("ok")

    def retry_after(self) -> int:
        """Seconds until it is worth to ask again: about as long as the engine took to load."""
        seconds = sum(seconds for _, seconds in self.serving.ready.ledger) if self.serving else 5.0
        return max(1, min(60, math.ceil(seconds)))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless `name` is one of the served model's (or left out)."""
        if name is not None and not self.config.serves(name):
            accepted = ", ".join(self.config.model_names)[:400]
            fix = "or start the server with --served-model-name NAME (or '*')"
            message = f"model: {name[:200]!r} is not served; accepted: {accepted}; {fix}"
            raise ApiError(404, "model_not_found", message, "model")

    def report_ignored(self, fields: Iterable[str]) -> dict[str, str]:
        """The response header that lists fields nobody reads; each is logged once.

        Raises ApiError 400 under `--strict-fields` if there are any.
        """
        unread: dict[str, Unread] = {}
        for field in islice(fields, MAX_REPORTED):
            shown = field.encode("ascii", "backslashreplace").decode()[:80]
            found = field if isinstance(field, Unread) else Unread(field)
            if self.config.strict_fields:
                raise unknown(shown, found.why, found.meant())
            unread.setdefault(general_path(shown), found)
        names = list(unread)
        for name, field in unread.items():
            if name not in self._reported and len(self._reported) < 1000:
                self._reported.add(name)
                meant = field.meant()
                hint = "" if meant is None else f"; did you mean {meant}?"
                logger.warning("request field %r was ignored: %s%s", name, field.why, hint)
        printable = ["".join(c if 32 <= ord(c) < 127 and c != "," else "?" for c in name) for name in names]
        return {"x-atlas-ignored-fields": ", ".join(printable)} if printable else {}
