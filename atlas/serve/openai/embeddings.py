"""POST /v1/embeddings: vectors of texts, pooled from the rows that the served model's head reads."""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atlas.engine.client import EngineClient, EngineUnavailableError
from atlas.engine.sampling import Pooling, SamplingParams
from atlas.serve.access.limits import Account, account_of
from atlas.serve.body import parse
from atlas.serve.errors import ApiError, invalid, unavailable
from atlas.serve.generation import failure
from atlas.serve.http import json_response, unless_gone
from atlas.serve.openai.prompts import encode_prompt, split
from atlas.serve.openai.requests import PROMPTS, about
from atlas.serve.service import Service, Serving
from atlas.serve.telemetry.tracking import Generation


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Annotated[str | list[Any], about("A text, several, token ids, or several lists of them.", anyOf=PROMPTS)]
    model: Annotated[str | None, about("The served model's name.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, about("Numbers, or their bytes as float32 in little-endian order.")
    ] = None
    dimensions: Annotated[int | None, about("Keep so many elements and scale to length 1 again.", minimum=1)] = None
    pooling: Annotated[
        Pooling | None, about("The mean over all tokens of a text (the default), or what its last token has.")
    ] = None
    user: Annotated[str | None, about("Who asks, in the client's own words; the answer does not depend on it.")] = None


EMBEDDINGS_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (),
    "normalize": (True,),
    "add_special_tokens": (True,),
}


class Embedding(msgspec.Struct, frozen=True):
    """The vector of one text, of length 1."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    """Answer of POST /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


_AT_ONCE = 64
"""Texts that are given to the engine, or read from it, before others have their turn: 2,048 are a tenth of a second."""


class _Asked(msgspec.Struct, frozen=True):
    """What is kept of a request while it is answered. Its texts are not."""

    prompts: list[list[int]]
    pooling: Pooling
    dimensions: int | None
    base64: bool
    headers: dict[str, str]


async def embeddings(http: Request, service: Service) -> Response:
    """Raises ApiError 501 where the engine's backend cannot do it."""
    serving = service.require()
    asked = await _ask(http, service, serving)
    account = account_of(http.scope)
    account.enter_queue(len(asked.prompts))
    tokens = sum(map(len, asked.prompts))
    account.spend(tokens)
    vectors = await unless_gone(http, _embed(serving.engine, asked, account))

    def answer() -> Response:
        data = [Embedding(index, _worded(vector, asked)) for index, vector in enumerate(vectors)]
        usage = EmbeddingUsage(tokens, tokens)
        return json_response(EmbeddingList(data, service.config.model_name, usage), asked.headers)

    # Words of a vector take about as long as so many bytes of text.
    return await serving.frontend.run(answer, sum(map(len, vectors)))


async def _ask(http: Request, service: Service, serving: Serving) -> _Asked:
    read = partial(parse, kind=EmbeddingRequest, neutral=EMBEDDINGS_REFUSED)
    (request, ignored), body_size = await serving.frontend.read(http, read)
    headers = service.report_ignored(ignored)
    service.check_model(request.model)
    size = serving.ready.embedding_size
    if request.dimensions is not None and not 1 <= request.dimensions <= (size or math.inf):
        accepted = f"an integer from 1 to {size}" if size else "an integer of at least 1"
        raise invalid("dimensions", str(request.dimensions)[:40], accepted)
    parts = split("input", request.input)
    prompts = await serving.frontend.run(
        lambda: [encode_prompt(serving, where, prompt) for where, prompt in parts], body_size
    )
    if not size:
        message = f"embeddings: backend {serving.ready.backend} makes none; accepted: a server that runs on a CPU"
        raise ApiError(501, "embeddings_unsupported", message)
    return _Asked(prompts, request.pooling or "mean", request.dimensions, request.encoding_format == "base64", headers)


async def _embed(engine: EngineClient, asked: _Asked, account: Account) -> list[bytes]:
    """The vector of each prompt as the engine says it. Raises ApiError 500, 503."""
    prompts, pooling = asked.prompts, asked.pooling
    # A mean is over rows of all tokens, which are made for those who want the prompt's log-probabilities.
    sampling = SamplingParams(max_tokens=0, pooling=pooling, prompt_logprobs=0 if pooling == "mean" else None)
    vectors = []
    with ExitStack() as running:
        submitted = []
        try:
            for prompt in prompts:
                submitted.append(running.enter_context(engine.submit(prompt, sampling)))
                if not len(submitted) % _AT_ONCE:
                    await asyncio.sleep(0)
        except EngineUnavailableError as error:
            raise unavailable("engine_unavailable", str(error)) from None
        for prompt, stream in zip(prompts, submitted, strict=True):
            with Generation(len(prompt), 0, True) as seen:
                async for output in stream:
                    if output.finish_reason in ("error", "abort"):
                        raise failure(engine, output)
                    if output.embedding is not None:
                        vectors.append(output.embedding)
                        seen.received(0, output.timing)
                        seen.finish_reason = "length"
            account.leave_queue()
            if not len(vectors) % _AT_ONCE:  # what has come already is read without waiting
                await asyncio.sleep(0)
    return vectors


def _worded(vector: bytes, asked: _Asked) -> list[float] | str:
    """A vector cut to the dimensions that are wanted, scaled to length 1."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    values = values[: asked.dimensions]
    length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    scaled = array("f", [value / length for value in values])
    if not asked.base64:
        return scaled.tolist()
    if sys.byteorder == "big":
        scaled.byteswap()
    return base64.b64encode(scaled.tobytes()).decode()
