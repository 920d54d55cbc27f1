"""GET /metrics."""

from __future__ import annotations

import asyncio
import importlib

from starlette.requests import Request
from starlette.responses import Response

from atlas.serve.service import Service
from atlas.serve.telemetry.metrics import engine_series, response_series


async def metrics(request: Request, service: Service) -> Response:
    """Whatever the state of the server: a scrape that fails tells nobody why."""
    # Not on the event loop, where every stream would wait for it; after the first time it costs nothing.
    exposition = await asyncio.to_thread(importlib.import_module, "atlas.serve.telemetry.exposition")
    engine = service.engine
    stats = await service.engine_watch.stats(engine)
    up, ready = (False, None) if engine is None else (engine.state == "ready", engine.ready)
    responses = response_series(*await service.responses.usage(), len(service.background))
    series = [*service.metrics.series(), *responses, *engine_series(up, ready, stats)]
    labels = {"model_name": service.config.model_name}
    body, content_type = await exposition.render(
        series, service.config.metrics_prefix, labels, request.headers.get("accept", "")
    )
    return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})
