"""Who asks: an ASGI layer that lets requests through only with one of the server's keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from atlas.api_keys import digest
from atlas.serve.errors import ApiError

CLIENT = "atlas.client"
"""Where the scope says who asks: a key's digest in hexadecimal, or ANONYMOUS. What is stored or counted for a key is
known by it, so it is all of the digest: of the short names for people, two of some thousands of keys may be equal."""
ANONYMOUS = "anonymous"
STRANGER = "stranger"
"""Who asks without a key where others have one: a probe, which is told no more than it needs."""

OPEN_PATHS = frozenset({"/health", "/health/live"})
"""What probes ask, which have no key."""

_FIX = "send `Authorization: Bearer KEY` or `x-api-key: KEY`"


class Auth:
    """Answers 401 to a request without a valid key, before its body is read; without keys lets all through.

    A key may come in either header: OpenAI's clients send the first, Anthropic's the second. Where both come, one
    valid key is enough, since a proxy may use `Authorization` for itself.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[bytes]) -> None:
        self._app, self._keys = app, tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        client = ANONYMOUS
        # A preflight carries no credentials by its standard; the router answers it 405 where it gets this far.
        if self._keys:
            try:
                client = self._authenticate(scope["headers"]).hex()
            except ApiError as error:
                if scope["path"] not in OPEN_PATHS or scope["method"] not in ("GET", "HEAD"):
                    await error.response(scope)(scope, receive, send)
                    return
                client = STRANGER
        scope[CLIENT] = client
        await self._app(scope, receive, send)

    def _authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The digest of the key that was presented. Raises ApiError 401, which never quotes what came."""
        given: dict[bytes, list[bytes]] = {b"x-api-key": [], b"authorization": []}
        for name, value in headers:
            if name in given:
                given[name].append(value)
        problem: ApiError | None = None
        for name, values in given.items():
            if not values:
                continue
            try:
                return self._find(name.decode(), values)
            except ApiError as error:
                problem = error
        raise problem or _refused("authorization", "missing", "missing_api_key")

    def _find(self, header: str, values: list[bytes]) -> bytes:
        if len(values) > 1:
            raise _refused(header, f"given {len(values)} times")
        key = values[0].strip()
        if header == "authorization":
            scheme, _, key = key.partition(b" ")
            key = key.strip()
            if scheme.lower() != b"bearer":
                raise _refused(header, "not of the scheme Bearer")
        if not key:
            raise _refused(header, "an empty key", "missing_api_key")
        presented, found = digest(key), None
        # All are compared, each in constant time: how long it takes says nothing about any of them.
        for known in self._keys:
            if hmac.compare_digest(presented, known):
                found = known
        if found is None:
            raise _refused(header, "not a key of this server")
        return found


def _refused(header: str, found: str, code: str = "invalid_api_key") -> ApiError:
    return ApiError(401, code, f"{header}: {found}; {_FIX}", header, {"WWW-Authenticate": "Bearer"})
