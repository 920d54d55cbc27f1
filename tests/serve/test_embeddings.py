"""/v1/embeddings over HTTP: OpenAI's shapes. What the numbers are: tests/engine/test_embeddings.py."""

from __future__ import annotations

import base64
import inspect
import struct
from typing import Any

import numpy as np
import openai
import pytest
from scripted_engine import embedding
from serve_harness import RunningServer, Start, ids_of

from atlas.serve.openai.embeddings import EMBEDDINGS_REFUSED, EmbeddingRequest


def expected(ids: list[int], pooling: str = "mean", dimensions: int = 8) -> np.ndarray[Any, Any]:
    """What the scripted engine makes of a prompt, as it has to come out: cut, of length 1."""
    vector = np.frombuffer(embedding(ids, pooling, 8), "<f4").astype(np.float64)[:dimensions]
    return vector / np.linalg.norm(vector)


def ask(server: RunningServer, **fields: Any) -> Any:
    return server.openai().embeddings.create(**{"model": "tiny", "input": "yo", **fields})


YO = [1, *ids_of("yo")]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("yo", [YO]),
        (["yo", "a"], [YO, [1, *ids_of("a")]]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        (["yo", [9]], [YO, [9]]),
    ],
)
@pytest.mark.parametrize("encoding_format", ["float", "base64", None])  # None: the client asks for base64, and decodes
def test_inputs(shared: RunningServer, given: Any, prompts: list[list[int]], encoding_format: str | None) -> None:
    fields = {} if encoding_format is None else {"encoding_format": encoding_format}
    answer = ask(shared, input=given, **fields)
    assert (answer.object, answer.model, len(answer.data)) == ("list", "tiny", len(prompts))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    for index, (entry, ids) in enumerate(zip(answer.data, prompts, strict=True)):
        assert (entry.object, entry.index) == ("embedding", index)
        found = entry.embedding
        if isinstance(found, str):
            found = struct.unpack("<8f", base64.b64decode(found))
        assert np.allclose(found, expected(ids), rtol=1e-6)


@pytest.mark.parametrize("dimensions", [1, 3, 8])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_dimensions_and_pooling(shared: RunningServer, dimensions: int, pooling: str) -> None:
    (entry,) = ask(shared, dimensions=dimensions, extra_body={"pooling": pooling}).data
    assert np.allclose(entry.embedding, expected(YO, pooling, dimensions), rtol=1e-6)
    assert abs(np.linalg.norm(entry.embedding) - 1) < 1e-6


def test_many_inputs(shared: RunningServer) -> None:
    texts = [f"{i}" for i in range(300)]
    answer = ask(shared, input=texts)
    assert [entry.index for entry in answer.data] == list(range(300))
    for entry, text in zip(answer.data, texts, strict=True):
        assert np.allclose(entry.embedding, expected([1, *ids_of(text)]), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": ""}, None, None),
        ({"input": []}, "invalid_value", "input"),
        ({"input": None}, "invalid_value", "input"),
        ({"input": ["a", 3]}, "invalid_value", "input[1]"),
        ({"input": [1, 320]}, "invalid_value", "input[1]"),
        ({"input": [[]]}, "empty_prompt", "input[0]"),
        ({"input": "x" * 600}, "context_length_exceeded", "input"),
        ({"dimensions": 0}, "invalid_value", "dimensions"),
        ({"dimensions": 9}, "invalid_value", "dimensions"),
        ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"pooling": "cls"}, "invalid_value", "pooling"),
        ({"truncate_prompt_tokens": 3}, "unsupported_parameter", "truncate_prompt_tokens"),
    ],
)
def test_errors(shared: RunningServer, fields: dict[str, Any], code: str | None, param: str | None) -> None:
    response = shared.http.post("/v1/embeddings", json={"input": "yo", **fields})
    if code is None:  # an empty text has a BOS
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


def test_where_there_are_none(start: Start) -> None:
    server = start(embedding_size=0).wait_ready()
    response = server.http.post("/v1/embeddings", json={"input": "yo"})
    assert (response.status_code, response.json()["error"]["code"]) == (501, "embeddings_unsupported")
    assert "scripted" in response.json()["error"]["message"]
    assert server.http.post("/v1/embeddings", json={"input": 3}).status_code == 400


def test_every_field_of_the_official_client_is_read_or_refused() -> None:
    parameters = set(inspect.signature(openai.resources.Embeddings.create).parameters)
    for name in parameters - {"self", "extra_headers", "extra_query", "extra_body", "timeout"}:
        assert name in EMBEDDINGS_REFUSED or name in EmbeddingRequest.__struct_fields__, name
