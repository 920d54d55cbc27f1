"""GET /server_info: what runs, why, and how full it is."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import atlas
from atlas.engine.client import EngineUnavailableError
from atlas.serve.errors import unavailable
from atlas.serve.http import json_response
from atlas.serve.service import Service


class ServerInfo(msgspec.Struct, frozen=True):
    """backend, kernel_set: what executes the model; reason: why it was chosen.

    start: seconds per stage of the engine's load.  memory: bytes by owner.  engine: a snapshot between two steps.
    """

    version: str
    model: str
    fingerprint: str
    backend: str
    kernel_set: str
    reason: str
    max_context: int
    start: dict[str, float]
    memory: dict[str, int]
    engine: dict[str, int]


async def server_info(_: Request, service: Service) -> Response:
    """Raises ApiError 503 while there is nothing to describe."""
    serving = service.require()
    ready = serving.ready
    try:
        stats = await serving.engine.stats()
    except EngineUnavailableError as error:
        raise unavailable("engine_unavailable", str(error)) from None
    return json_response(
        ServerInfo(
            version=atlas.__version__,
            model=service.config.model_name,
            fingerprint=serving.fingerprint,
            backend=ready.backend,
            kernel_set=ready.kernel_set,
            reason=ready.reason,
            max_context=ready.max_context,
            start=dict(ready.ledger),
            memory=dict(ready.memory),
            engine=msgspec.structs.asdict(stats),
        )
    )
