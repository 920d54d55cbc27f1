"""The application: its routes, the layers around them, and the error shape of what goes wrong on the way to them."""

from __future__ import annotations

import asyncio
import difflib
import logging
import re
from collections.abc import Iterable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atlas.serve.access.auth import Auth
from atlas.serve.access.guard import Guard
from atlas.serve.access.limits import Deadline, Limits
from atlas.serve.errors import ApiError, speaks_anthropic
from atlas.serve.reference.endpoint import Endpoint
from atlas.serve.reference.unknown_fields import NO_PARAMETER, Unread
from atlas.serve.routes import ENDPOINTS
from atlas.serve.service import Service
from atlas.serve.telemetry import tracking

logger = logging.getLogger("atlas.serve")

_LEADING_V1 = re.compile(r"(/v1)+(?=/)")
_LONGEST_PATH = 60  # that may be a slip of the pen


def create_app(service: Service, keys: Iterable[bytes], bound: Sequence[str]) -> ASGIApp:
    """The ASGI application of one server: the routes, inside layers that say who may ask and how much.

    Args:
        keys: digests of the API keys; none: whoever reaches the server may ask.
        bound: the host that it listens on, as it was named and as the socket has it.

    Raises:
        ConfigError: `--allowed-host` or `--cors-origin` is wrong.
    """

    routes = _Routes(service)
    # From the inside out. Whoever is turned away by an outer layer costs the inner ones nothing.
    config = service.config
    limits = Limits(Deadline(routes, config.request_timeout), config, draining=lambda: service.draining)
    limited = _Counting(limits, service)
    guarded = Guard(Auth(limited, keys), bound, config.allowed_host, config.cors_origin)
    return tracking.Tracking(guarded, service.metrics, service.finished, routes.path_of)


class _Routes:
    """Finds the endpoint. A Starlette application does the same, with three more layers around every message of a
    stream."""

    def __init__(self, service: Service) -> None:
        """One route for each path: a router looks no further than the first that has the path, whatever its methods
        are."""
        paths: dict[str, dict[str, Endpoint]] = {}
        for endpoint in ENDPOINTS:
            paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        self._routes = [
            Route(path, _Handler(path, endpoints, service), methods=list(endpoints))
            for path, endpoints in paths.items()
        ]
        # No redirect for a slash too many: it would go where the Host header says, and take the client's key along.
        self._router = Router(self._routes, redirect_slashes=False)

    def path_of(self, path: str) -> str | None:
        """The route of a request's path, as the table has it, whatever the method is; None: there is none."""
        return next((route.path for route in self._routes if route.path_regex.match(path)), None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # then the router raises what it finds wrong, instead of answering it
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await self._http_error(scope, error).response(scope)(scope, receive, send)

    def _http_error(self, scope: Scope, error: HTTPException) -> ApiError:
        path = scope["path"][:200]
        if error.status_code == 404:
            return ApiError(404, "unknown_endpoint", f"{path}: there is no such endpoint{self._hint(path)}")
        message = f"{scope['method'][:20]} {path}: {error.detail}"
        if allowed := (error.headers or {}).get("Allow"):
            message += f"; accepted: {', '.join(sorted(allowed.split(', ')))}"
        assert error.status_code == 405, error  # the router raises no other
        return ApiError(405, "method_not_allowed", message, headers=error.headers)

    def _hint(self, path: str) -> str:
        """What a client that asks this was meant to be told: most have a base URL with a /v1 too few or too many."""
        if path.endswith("/") and self.path_of(path.rstrip("/")) is not None:
            return f"; did you mean {path.rstrip('/')}?"
        meant = "/v1" + _LEADING_V1.sub("", path)
        if meant == path or self.path_of(meant) is None:
            near = difflib.get_close_matches(
                path[:_LONGEST_PATH], [route.path for route in self._routes], n=1, cutoff=0.75
            )
            return "; " + (f"did you mean {near[0]}? " if near else "") + "GET /docs shows those that there are"
        hint = f"; did you mean {meant}?"
        if _LEADING_V1.match(path):
            if speaks_anthropic({"path": meant}):
                return f"{hint} give Anthropic's client a base_url without /v1"
            return f"{hint} give the client a base_url that has /v1 once"
        # Anthropic's clients write /v1 themselves.
        return hint if speaks_anthropic({"path": meant}) else f"{hint} give the client a base_url that ends in /v1"


class _Handler:
    """The endpoints of one path, by method."""

    def __init__(self, path: str, endpoints: dict[str, Endpoint], service: Service) -> None:
        self._path, self._endpoints, self._service = path, endpoints, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        endpoint = self._endpoints[method]
        try:
            told = self._service.report_ignored(_unread_query(request, endpoint))
            response = await endpoint.handler(request, self._service)
            for name, value in told.items():
                others = response.headers.get(name)
                response.headers[name] = f"{others}, {value}" if others else value
            return response
        except ApiError as error:
            return error.response(request.scope)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception:
            logger.exception("%s %s failed", method, self._path)
            return ApiError(500, "internal_error", "the server failed on this request").response(request.scope)


def _unread_query(request: Request, endpoint: Endpoint) -> list[Unread]:
    """Parameters in the URL of an endpoint whose requests stand in their bodies."""
    if endpoint.body is None or not request.scope["query_string"]:
        return []
    # Anthropic's client says so of its own beta endpoints, which are the same here.
    return [Unread(f"?{name}", NO_PARAMETER) for name in request.query_params if name != "beta"]


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
