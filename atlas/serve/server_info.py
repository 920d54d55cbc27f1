"""GET /server_info: what runs, why, with which settings, and how full it is. GET /version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import atlas
from atlas.config import Origin, public
from atlas.engine.client import EngineUnavailableError
from atlas.serve.errors import unavailable
from atlas.serve.http import json_response
from atlas.serve.service import Service


class Setting(msgspec.Struct, frozen=True):
    """A value and where it came from: a flag, a file, the model, or built in."""

    value: Any
    origin: str


class Version(msgspec.Struct, frozen=True):
    """GET /version."""

    version: str


class ServerInfo(msgspec.Struct, frozen=True):
    """backend, kernel_set: what executes the model; reason: why it was chosen.

    start: seconds per stage of the engine's load.  memory: bytes by owner.  engine: a snapshot between two steps.
    config: every setting with its value and where that came from.
    sampling: what a request gets for fields that it leaves out, likewise; sampling_by_mode: for answers that reason
        ("thinking") and others ("plain"), as far as the model has both.
    presets: the parsers of answers, the thinking switch and which preset gave the sampling, likewise.
    """

    version: str
    model: str
    fingerprint: str
    backend: str
    target: dict[str, str]
    kernel_set: str
    reason: str
    max_context: int
    start: dict[str, float]
    memory: dict[str, int]
    engine: dict[str, Any]
    config: dict[str, Setting]
    sampling: dict[str, Setting]
    sampling_by_mode: dict[str, dict[str, Setting]]
    presets: dict[str, Setting]


async def server_info(_: Request, service: Service) -> Response:
    """Raises ApiError 503 while there is nothing to describe."""
    serving = service.require()
    ready, presets = serving.ready, serving.frontend.presets
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
            target=ready.target,
            kernel_set=ready.kernel_set,
            reason=ready.reason,
            max_context=ready.max_context,
            start=dict(ready.ledger),
            memory=dict(ready.memory),
            engine=msgspec.structs.asdict(stats),
            config=_settings(service.origins),
            sampling=_settings(presets.sampling().origins),
            sampling_by_mode={mode: _settings(defaults.origins) for mode, defaults in presets.modes().items()},
            presets=_settings(presets.origins),
        )
    )


def _settings(origins: Sequence[Origin]) -> dict[str, Setting]:
    return {origin.name: Setting(public(origin.value), origin.origin) for origin in origins}


async def version(_: Request, __: Service) -> Response:
    """Also while there is nothing to serve yet."""
    return json_response(Version(atlas.__version__))
