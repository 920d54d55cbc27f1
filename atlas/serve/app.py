"""The application: its routes, the layers around them, and the error shape of what goes wrong on the way to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atlas.serve import tracking
from atlas.serve.auth import Auth
from atlas.serve.endpoint import Endpoint
from atlas.serve.errors import ApiError
from atlas.serve.guard import Guard
from atlas.serve.limits import Deadline, Limits
from atlas.serve.routes import ENDPOINTS
from atlas.serve.service import Service

logger = logging.getLogger("atlas.serve")


def create_app(service: Service, keys: Iterable[bytes], bound: Sequence[str]) -> ASGIApp:
    """The ASGI application of one server: the routes, inside layers that say who may ask and how much.

    Args:
        keys: digests of the API keys; none: whoever reaches the server may ask.
        bound: the host that it listens on, as it was named and as the socket has it.

    Raises:
        ConfigError: `--allowed-host` or `--cors-origin` is wrong.
    """

    app = Starlette(
        routes=_routes(service),
        exception_handlers={HTTPException: _http_error},
    )
    # From the inside out. Whoever is turned away by an outer layer costs the inner ones nothing.
    config = service.config
    limited = _Counting(Limits(Deadline(app, config.request_timeout), config), service)
    guarded = Guard(Auth(limited, keys), bound, config.allowed_host, config.cors_origin)
    return tracking.Tracking(guarded, service.metrics, service.finished)


def _routes(service: Service) -> list[Route]:
    """One for each path: a router looks no further than the first that has the path, whatever its methods are."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [_route(path, endpoints, service) for path, endpoints in paths.items()]


def _route(path: str, endpoints: dict[str, Endpoint], service: Service) -> Route:
    async def handle(request: Request) -> Response:
        tracking.route_taken(path)
        method = "GET" if request.method == "HEAD" else request.method
        try:
            return await endpoints[method].handler(request, service)
        except ApiError as error:
            return error.response(request.scope)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception:
            logger.exception("%s %s failed", method, path)
            return ApiError(500, "internal_error", "the server failed on this request").response(request.scope)

    return Route(path, handle, methods=list(endpoints))


class _Counting:
    """Counts requests from the last byte of their body to the last byte of their answer, for a shutdown that
    waits for them. A body that never ends is not waited for."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        counted = False

        async def counting_receive() -> Message:
            nonlocal counted
            message = await receive()
            if not counted and message["type"] == "http.request" and not message.get("more_body"):
                counted = True
                self._service.active += 1
            return message

        try:
            await self._app(scope, counting_receive, send)
        except asyncio.CancelledError:
            # At the end uvicorn cancels what is left: requests whose body never came.
            if counted or not self._service.draining:
                raise
            response = ApiError(503, "server_shutting_down", "the server is shutting down").response(scope)
            await response(scope, counting_receive, send)
        finally:
            self._service.active -= counted


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"{request.url.path[:200]}: there is no such endpoint"
        return ApiError(404, "unknown_endpoint", message).response(request.scope)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return ApiError(error.status_code, "http_error", message, headers=error.headers).response(request.scope)
