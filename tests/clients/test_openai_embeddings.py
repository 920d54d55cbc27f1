"""Embeddings through the official client, and through LangChain's."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from atlas.tokenizer import Tokenizer
from tests.serve.real_server import MODEL, RealServer

TEXTS = ["The cat sleeps on the sofa.", "A kitten naps on a couch.", "Interest rates rose again in March. 😀"]
SIZE = 576
"""Of SmolLM2-135M's hidden states."""


@pytest.fixture(autouse=True)
def makes_embeddings(client: openai.OpenAI, server: RealServer) -> None:
    """The GPU backends say 501: where tests run against one, nothing else can be asked of it."""
    if not server.info()["backend"].startswith("cpu"):
        with pytest.raises(openai.InternalServerError) as caught:
            client.embeddings.create(model=MODEL, input="x")
        assert (caught.value.status_code, caught.value.code) == (501, "embeddings_unsupported")
        pytest.skip("embeddings_unsupported: the server runs on a GPU")


def embed(client: openai.OpenAI, given: Any, **options: Any) -> list[list[float]]:
    answer = client.embeddings.create(model=MODEL, input=given, **options)
    assert [entry.index for entry in answer.data] == list(range(len(answer.data))) and answer.model == MODEL
    return [entry.embedding for entry in answer.data]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def test_one_vector_for_each_text(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    vectors = [entry.embedding for entry in answer.data]
    assert [len(vector) for vector in vectors] == [SIZE] * 3
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=True)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2])


def test_a_batch_is_its_texts_one_by_one(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    batch = embed(client, TEXTS)
    for text, vector in zip(TEXTS, batch, strict=True):
        (alone,) = embed(client, text)
        assert alone == vector
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    assert embed(client, ids) == batch and embed(client, ids[0]) == batch[:1]


def test_both_encodings_say_the_same(client: openai.OpenAI) -> None:
    """The client itself asks for base64 where nothing is said."""
    (default,) = embed(client, TEXTS[0])
    (numbers,) = embed(client, TEXTS[0], encoding_format="float")
    assert default == pytest.approx(numbers, rel=1e-6)
    raw = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="base64").data[0].embedding
    assert isinstance(raw, str)


def test_pooling(client: openai.OpenAI) -> None:
    (mean,) = embed(client, TEXTS[0])
    (last,) = embed(client, TEXTS[0], extra_body={"pooling": "last"})
    assert cosine(mean, last) < 0.999
    (one,), (same,) = (embed(client, [5], extra_body={"pooling": pooling}) for pooling in ("mean", "last"))
    assert one == pytest.approx(same, abs=1e-5)  # of one token both are the same


def test_langchain(server: RealServer, client: openai.OpenAI) -> None:
    model = OpenAIEmbeddings(model=MODEL, base_url=server.url + "/v1", api_key="none", check_embedding_ctx_length=False)
    assert model.embed_documents(TEXTS) == embed(client, TEXTS)
    assert model.embed_query(TEXTS[0]) == embed(client, TEXTS[0])[0]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": [[5, -1]]}, "input[0]"),
        ({"input": "x " * 2000}, "input"),
        ({"input": "x", "dimensions": 100_000}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_value_names_its_field(client: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, **options)
    assert str(caught.value.param).startswith(param)
