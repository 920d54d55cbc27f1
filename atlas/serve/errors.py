"""Errors as the OpenAI API shapes them: message, type, param and a code that stays the same."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from atlas.errors import AtlasError
from atlas.serve import tracking


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

    def response(self) -> Response:
        """The whole HTTP response."""
        return Response(self.encode(), self.status, self.headers, media_type="application/json")


def invalid(param: str | None, found: str, accepted: str = "", *, code: str = "invalid_value") -> ApiError:
    """400: a field that is wrong. The message is built as every Atlas error is: where, found, accepted."""
    return ApiError(400, code, str(AtlasError(param or "request body", found, accepted)), param)


def unsupported(param: str, found: str, fix: str = "leave it out") -> ApiError:
    """400: a field that Atlas knows but does not support, with a value that would change the answer."""
    message = str(AtlasError(param, f"{found} is not supported by this server", fix=fix))
    return ApiError(400, "unsupported_parameter", message, param)


def unavailable(code: str, message: str, retry_after: int = 5) -> ApiError:
    """503: try again later."""
    return ApiError(503, code, message, headers={"Retry-After": str(retry_after)})


def generation_failed(message: str) -> ApiError:
    """500: this one request broke in the engine."""
    return ApiError(500, "generation_failed", message)


def _type_of(status: int) -> str:
    if status == 503:
        return "service_unavailable_error"
    if status >= 500:
        return "server_error"
    return "not_found_error" if status == 404 else "invalid_request_error"
