"""Errors as the OpenAI API shapes them, and under /v1/messages as Anthropic's does: a message that names the field, and
a code that stays the same."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from atlas.errors import AtlasError
from atlas.serve.telemetry import tracking

NEXT_EVENT = "atlas.next_event"
"""Where the scope of a stream whose events have numbers keeps what tells that of the next: Callable[[], int]."""

_ANTHROPIC_PATH = re.compile(r"(/v1)*/messages(/.*)?", re.DOTALL)


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The inside of an error response: OpenAI's fields, and the request's id, which clients show."""

    message: str
    type: str
    param: str | None
    code: str
    request_id: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """`{"error": {...}}`: the whole body of a failed request, and an event in a stream that breaks off."""

    error: ErrorBody


class AnthropicErrorDetails(msgspec.Struct, frozen=True):
    """Where Anthropic's clients look for the code."""

    error_code: str


class AnthropicError(msgspec.Struct, frozen=True):
    """The inside of an error response of Anthropic's API, and Atlas's code and field beside it."""

    type: str
    message: str
    code: str
    param: str | None
    details: AnthropicErrorDetails


class AnthropicErrorResponse(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """`{"type": "error", "error": {...}}`."""

    error: AnthropicError
    request_id: str | None = None


class ResponsesErrorEvent(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """What breaks off a stream of OpenAI's Responses API. Its clients read the fields, those of the older APIs and the
    official one `error`."""

    code: str
    message: str
    param: str | None
    sequence_number: int
    error: ErrorBody


class ApiError(Exception):
    """A request ends with this HTTP status and body.

    Args:
        status: HTTP status.
        code: short name that clients may test for; never changes for one cause.
        message: one sentence for a person, naming the field.
        param: the field, as a path such as `messages[0].content`.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.body = ErrorBody(message, _type_of(status), param, code)

    def encode(self) -> bytes:
        """The JSON of the error, for the current request."""
        request_id = tracking.failed(self.body.code)
        return msgspec.json.encode(ErrorResponse(msgspec.structs.replace(self.body, request_id=request_id)))

    def encode_for(self, scope: Scope) -> bytes:
        """The JSON of the error, as the API that was asked shapes it."""
        if not speaks_anthropic(scope):
            return self.encode()
        request_id = tracking.failed(self.body.code)
        body = self.body
        details = AnthropicErrorDetails(body.code)
        inside = AnthropicError(_anthropic_type(self.status), body.message, body.code, body.param, details)
        return msgspec.json.encode(AnthropicErrorResponse(inside, request_id))

    def response(self, scope: Scope | None = None) -> Response:
        """The whole HTTP response: in OpenAI's shape, or that of the API that `scope` asks."""
        body = self.encode() if scope is None else self.encode_for(scope)
        return Response(body, self.status, self.headers, media_type="application/json")


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is for Anthropic's API, or meant to be: with a base URL that is wrong by a /v1."""
    return _ANTHROPIC_PATH.fullmatch(scope["path"]) is not None


def speaks_responses(scope: Scope) -> bool:
    """Whether a request is for OpenAI's Responses API, whose streams are worded as those of no other."""
    path: str = scope["path"]
    return path == "/v1/responses" or path.startswith("/v1/responses/")


def error_event(scope: Scope, error: ApiError) -> bytes:
    """The error as a server-sent event, for a stream that breaks off: it has a name but in OpenAI's older APIs."""
    if speaks_responses(scope):
        body = msgspec.structs.replace(error.body, request_id=tracking.failed(error.body.code))
        number = scope[NEXT_EVENT]() if NEXT_EVENT in scope else 0
        event = ResponsesErrorEvent(body.code, body.message, body.param, number, body)
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    name = b"event: error\n" if speaks_anthropic(scope) else b""
    return name + b"data: " + error.encode_for(scope) + b"\n\n"


def invalid(param: str | None, found: str, accepted: str = "", *, code: str = "invalid_value") -> ApiError:
    """400: a field that is wrong. The message is built as every Atlas error is: where, found, accepted."""
    return ApiError(400, code, str(AtlasError(param or "request body", found, accepted)), param)


def unsupported(param: str, found: str, fix: str = "leave it out") -> ApiError:
    """400: a field that Atlas knows but does not support, with a value that would change the answer."""
    message = str(AtlasError(param, f"{found} is not supported by this server", fix=fix))
    return ApiError(400, "unsupported_parameter", message, param)


def unknown(param: str, why: str, meant: str | None = None) -> ApiError:
    """400: a field that nothing reads, on a server that is strict about it. meant: one that exists."""
    fix = "leave it out (this server was started with --strict-fields)"
    if meant is not None:
        fix = f"did you mean {meant}? Otherwise {fix}"
    return ApiError(400, "unknown_parameter", str(AtlasError(param, why, fix=fix)), param)


def unavailable(code: str, message: str, retry_after: int = 5) -> ApiError:
    """503: try again later."""
    return ApiError(503, code, message, headers={"Retry-After": str(retry_after)})


def generation_failed(message: str) -> ApiError:
    """500: this one request broke in the engine."""
    return ApiError(500, "generation_failed", message)


def engine_failed(message: str) -> ApiError:
    """500: the engine died while it computed this request. That may be the request's fault, so the official clients,
    which send again what failed with 500, are told not to."""
    return ApiError(500, "engine_failed", message, headers={"x-should-retry": "false"})


def too_many(code: str, message: str, retry_after: int, headers: Mapping[str, str] | None = None) -> ApiError:
    """429: a limit is reached; try again in `retry_after` seconds."""
    return ApiError(429, code, message, headers={"Retry-After": str(retry_after), **(headers or {})})


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


def _type_of(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _anthropic_type(status: int) -> str:
    usual = "api_error" if status >= 500 else _type_of(status)
    return _ANTHROPIC_TYPES.get(status, usual)
