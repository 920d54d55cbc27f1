"""What a web page somewhere must not do to a server on this machine or network: an ASGI layer.

A browser can be made to send requests anywhere. Three checks keep strange pages out, before anything else is done:
the Host header names this server (else a name of the page's own was pointed here: DNS rebinding), an Origin is this
server's own or one that `--cors-origin` names, and a body is declared as JSON, which a page can send to another origin
only after asking (a preflight).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from atlas.errors import ConfigError
from atlas.serve.bind import parse_address
from atlas.serve.errors import ApiError

EXPOSED_HEADERS = (
    "retry-after",
    "x-atlas-ignored-fields",
    "x-atlas-max-tokens",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
)
"""Answer headers that a page may read."""

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{0,5}))?")
_ORIGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.+)")
_DEFAULT_PORTS = {"http": 80, "https": 443}

Authority = tuple[str, int | None]
"""A host in its one spelling, and the port if there is one."""


def parse_authority(text: str) -> Authority | None:
    """`Name.`, `1.2.3.4:80`, `[::1]:80` in one spelling each; None for anything that no browser sends."""
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        return None
    name, port = match[1].lower().removesuffix("."), int(match[2]) if match[2] else None
    if name.startswith("["):
        address = parse_address(name[1:-1])
        if address is None:
            return None
        name = str(address)
    elif not name or name.startswith("."):
        return None
    return None if port is not None and port > 65535 else (name, port)


def parse_origin(text: str) -> tuple[str, Authority] | None:
    """Scheme and authority, a default port left out; None for `null` and for what is no origin."""
    match = _ORIGIN.fullmatch(text)
    authority = parse_authority(match[2]) if match else None
    if match is None or authority is None:
        return None
    scheme, (name, port) = match[1].lower(), authority
    return scheme, (name, None if port == _DEFAULT_PORTS.get(scheme) else port)


class Guard:
    """Refuses what a strange web page sends; answers preflights and adds CORS headers for those that are allowed.

    Args:
        bound: what the server listens on, as the user named it and as the socket does.
        allowed_hosts: more names of it; `*.NAME` for all below NAME, `*` for any.
        cors_origins: origins whose pages may call it; `*` for any.

    Raises:
        ConfigError: a host or an origin that is none.
    """

    def __init__(
        self, app: ASGIApp, bound: Sequence[str], allowed_hosts: Sequence[str] = (), cors_origins: Sequence[str] = ()
    ) -> None:
        own = {str(parse_address(name) or name.lower().removesuffix(".")) for name in bound}
        self._any_host, self._any_origin = "*" in allowed_hosts, "*" in cors_origins
        allowed = {_allowed_host(name) for name in allowed_hosts if name != "*"}
        self._suffixes = tuple(name for name in allowed if name.startswith("."))
        self._hosts = {"localhost", *own, *allowed}
        # Who listens everywhere has many addresses; and where the Host is an address, no name was pointed here.
        self._any_address = any(address.is_unspecified for address in map(parse_address, own) if address)
        self._origins = {_origin(origin) for origin in cors_origins if origin != "*"}
        app = JsonOnly(app)
        if cors_origins:
            app = CORSMiddleware(
                app,
                allow_origins=["*"] if self._any_origin else [_spelt(origin) for origin in self._origins],
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            try:
                self._check_origin(scope, self._check_host(scope))
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> Authority:
        text = _single(scope, b"host")
        if text is None:
            raise ApiError(400, "invalid_host", "host: missing; accepted: one Host header", "host")
        authority = parse_authority(text)
        if authority is None:
            message = f"host: {text[:80]!r}; accepted: a name or an address, with or without a port"
            raise ApiError(400, "invalid_host", message, "host")
        if not self._is_own(authority[0]):
            name = authority[0][:80]
            message = (
                f"host: {name!r} is not a name of this server; start it with `--allowed-host {name}` to make it one"
            )
            raise ApiError(403, "host_not_allowed", message, "host")
        return authority

    def _is_own(self, name: str) -> bool:
        if self._any_host or name in self._hosts or name.endswith(self._suffixes):
            return True
        address = parse_address(name)
        return address is not None and (self._any_address or address.is_loopback)

    def _check_origin(self, scope: Scope, host: Authority) -> None:
        text = _single(scope, b"origin")
        if text is None or self._any_origin:
            return
        origin = parse_origin(text)
        if origin is not None and (origin in self._origins or _same(scope, origin, host)):
            return
        shown = text[:80]
        fix = "" if origin is None else f"; start the server with `--cors-origin {shown}` to let its pages in"
        raise ApiError(403, "origin_not_allowed", f"origin: {shown!r} is not allowed{fix}", "origin")


class JsonOnly:
    """Answers 415 to a request whose body is not declared as JSON, or is in an encoding, which nothing would undo.

    Where there is no body nothing has to be declared: OpenAI's client for Node cancels a response in that way. Of
    methods that no endpoint has only those are looked at that are known to have a body: the router says 405.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["method"].upper() in ("POST", "PUT", "PATCH"):
            try:
                text = _single(scope, b"content-type")
                kind = (text or "").partition(";")[0].strip().lower()
                if kind != "application/json" and (text is not None or _has_body(scope)):
                    message = f"content-type: {kind[:80] or 'missing'!r}; accepted: application/json"
                    raise ApiError(415, "unsupported_media_type", message, "content-type")
                encoding = (_single(scope, b"content-encoding") or "identity").strip().lower()
                if encoding != "identity":
                    message = (
                        f"content-encoding: {encoding[:80]!r}; accepted: identity, or none; send the body as it is"
                    )
                    raise ApiError(415, "unsupported_content_encoding", message, "content-encoding")
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _same(scope: Scope, origin: tuple[str, Authority], host: Authority) -> bool:
    """Whether a page of `origin` came from this server.

    A proxy in front may have ended TLS, so over http a page of https is ours too if its host is. A Host without a port
    means the default of the scheme that the browser used.
    """
    scheme, authority = origin
    if scheme not in _DEFAULT_PORTS or (scope.get("scheme") == "https" and scheme != "https"):
        return False
    name, port = host
    return authority == (name, None if port == _DEFAULT_PORTS[scheme] else port)


def _single(scope: Scope, header: bytes) -> str | None:
    """The value of a header that may be there once. Raises ApiError 400 for more."""
    values: list[bytes] = [value for name, value in scope["headers"] if name == header]
    if len(values) > 1:
        name = header.decode()
        raise ApiError(400, "repeated_header", f"{name}: given {len(values)} times; accepted: once", name)
    return values[0].decode("latin-1").strip() if values else None


def _has_body(scope: Scope) -> bool:
    """Whether a request's head announces a body."""
    announced = {name: value.strip() for name, value in scope["headers"]}
    return b"transfer-encoding" in announced or announced.get(b"content-length", b"0") != b"0"


def _allowed_host(text: str) -> str:
    """A value of `--allowed-host` in its one spelling; `*.name` as `.name`."""
    name = text.removeprefix("*.")
    address, parsed = parse_address(name), parse_authority(name)  # an IPv6 address may do without brackets
    if address is not None and name == text:
        return str(address)
    if parsed is None or parsed[1] is not None or name.endswith(":") or address is not None:
        accepted = "a host name or an address without scheme and port; *.NAME; *"
        raise ConfigError("--allowed-host", repr(text), accepted)
    return parsed[0] if name == text else "." + parsed[0]


def _origin(text: str) -> tuple[str, Authority]:
    """An origin of `--cors-origin`."""
    if text.strip().lower() == "null":
        raise ConfigError("--cors-origin", "'null', which any page can have", fix="say * to let every page in")
    origin = parse_origin(text)
    if origin is None:
        raise ConfigError("--cors-origin", repr(text), "scheme://host or scheme://host:port, without a path; *")
    return origin


def _spelt(origin: tuple[str, Authority]) -> str:
    """An origin as browsers write it."""
    scheme, (name, port) = origin
    return f"{scheme}://" + (f"[{name}]" if ":" in name else name) + ("" if port is None else f":{port}")
