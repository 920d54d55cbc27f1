"""What an endpoint is: one line of the table in `routes.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atlas.serve.service import Service

Handler = Callable[[Request, Service], Awaitable[Response]]

Shape = Any
"""A type that msgspec has a JSON Schema for (a struct, a generic struct of one), or None where there is no body."""


class Text(msgspec.Struct, frozen=True):
    """An answer that is not JSON, by its media type."""

    media_type: str


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The application's routes and the document at /openapi.json are both made from these.

    path: as Starlette writes it; `{name:path}` is a parameter that may hold slashes.
    summary: a line for a person.  tag: the group in which it stands in the documentation.
    body: the struct of the request's JSON body; None: it has none.
    refused: fields of it that are known but not supported, with the values, besides null, that ask for nothing.
    example: a body that is answered with 200, but for the model's name.
    untagged: structs of the body that are known without their tag too.
    answers: what comes with which status when nothing went wrong.
    stream: the shape of one server-sent event, where the body's `stream: true` asks for them.
    query: query parameters with the type and the meaning of each.
    errors: statuses of its own besides those that any endpoint may have (`openapi.py`).
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    summary: str
    tag: Literal["OpenAI", "Anthropic", "Tokens", "Server"]
    answers: Mapping[int, Shape]
    body: Shape = None
    refused: Mapping[str, tuple[Any, ...]] = {}
    example: Mapping[str, Any] = {}
    untagged: tuple[type[msgspec.Struct], ...] = ()
    stream: Shape = None
    query: Mapping[str, tuple[Shape, str]] = {}
    errors: tuple[int, ...] = ()
