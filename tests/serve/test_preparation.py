"""Requests in preparation: how many, and of how many bytes, before any stands in the engine's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from asgi import scope_of
from starlette.requests import Request
from starlette.types import Message, Scope

from atlas.config import ServeConfig
from atlas.serve import offload
from atlas.serve.access import limits
from atlas.serve.access.auth import ANONYMOUS, CLIENT
from atlas.serve.access.limits import Account, Limits, account_of
from atlas.serve.access.preparation import Place, Preparation
from atlas.serve.errors import ApiError
from atlas.serve.frontend import _encode
from atlas.serve.http import MAX_BODY, read_body


def is_full(error: ApiError) -> bool:
    return (error.status, error.body.code, "Retry-After" in error.headers) == (429, "preparation_full", True)


def fill(preparation: Preparation, owner: str, size: int) -> list[Place]:
    """As many requests of so many bytes as it takes."""
    places: list[Place] = []
    while True:
        place = None
        try:
            place = preparation.enter(owner)
            place.hold(size)
        except ApiError as error:
            assert is_full(error)
            if place is not None:
                place.leave()
            return places
        places.append(place)


@pytest.mark.parametrize(("requests", "size"), [(10**6, 100), (12, 0)])
def test_whoever_comes_finds_room(requests: int, size: int) -> None:
    """The first may have half, and the next half of what is left to them, until all that there is left is one."""
    preparation = Preparation(requests, 1200)
    counts = []
    places: dict[str, list[Place]] = {}
    for owner in "abcde":
        places[owner] = fill(preparation, owner, size)
        counts.append(len(places[owner]))
    assert counts == [6, 3, 1, 1, 0]
    assert preparation.bytes.total() == 11 * size <= preparation.max_bytes
    for place in places["a"]:
        place.leave()
        place.leave()
    assert preparation.bytes.total() == 5 * size
    assert fill(preparation, "e", size)
    for place in (place for owner in "bcde" for place in places[owner]):
        place.leave()


def test_nothing_stays_of_those_who_have_gone() -> None:
    preparation = Preparation()
    for owner in range(100):
        place = preparation.enter(str(owner))
        place.hold(owner)
        place.hold(owner // 2)
        place.leave(owner // 3)
        assert preparation.bytes.total() == owner // 3
        place.hold(owner // 2)  # an answer
        place.leave()
        place.leave()
    assert (preparation.requests, preparation.bytes) == ({}, {})


@pytest.mark.parametrize("end", ["enter_queue", "close"])
def test_until_it_is_prepared(end: str) -> None:
    preparation = Preparation()
    account = Account(place=preparation.enter("a"))
    account.hold(1000)
    assert (preparation.requests["a"], preparation.bytes["a"]) == (1, 1000)
    getattr(account, end)(*([3] if end == "enter_queue" else []))
    assert (preparation.requests, preparation.bytes) == ({}, {})


def test_what_is_kept_is_held_until_the_end() -> None:
    """Of a response in the background, until that ends, and not the request."""
    preparation = Preparation()
    account = Account(place=preparation.enter("a"))
    account.hold(1000)
    other = account.outlive()
    account.close()
    assert (preparation.requests["a"], preparation.bytes["a"]) == (1, 1000)
    other.enter_queue(1, 300)
    assert (preparation.requests, preparation.bytes["a"]) == ({}, 300)
    other.close()
    other.close()
    assert preparation.bytes == {}


def chunked(sizes: list[int], headers: list[tuple[str, str]], scope: dict[str, Any]) -> Request:
    """A request whose body comes in pieces of these sizes; after the last one there is still more to come."""

    async def receive() -> Message:
        if not sizes:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bytes(sizes.pop(0)), "more_body": True}

    return Request({**scope_of("POST", "/v1/x", headers), **scope}, receive)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_counts_from_its_first_byte(declared: bool) -> None:
    """Where its length is declared, before: nothing of what does not fit is taken."""
    preparation = Preparation(max_bytes=2000)
    sizes = [400, 400, 400]

    async def main() -> None:
        headers = [("content-length", "1200")] if declared else []
        account = Account(place=preparation.enter("a"))
        with pytest.raises(ApiError) as error:
            await read_body(chunked(sizes, headers, {limits.ACCOUNT: account}))
        assert is_full(error.value)
        assert len(sizes) == (3 if declared else 0)
        account.close()
        assert not preparation.bytes

    asyncio.run(main())


def test_the_largest_body_finds_room_beside_two_that_have_all_they_can() -> None:
    preparation = Preparation()
    for owner in "ab":
        assert len(fill(preparation, owner, MAX_BODY)) >= 2
    preparation.enter("c").hold(MAX_BODY)


# ---- the layer -----------------------------------------------------------------------------------


async def stuck(layer: Limits, address: str, client: str) -> tuple[asyncio.Task[None], list[Message]]:
    """A request that never gets further; what was sent to its client."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {**scope_of("POST", "/v1/x", []), "client": (address, 1), CLIENT: client}
    task = asyncio.create_task(layer(scope, receive, send))
    await asyncio.sleep(0)
    return task, sent


@pytest.mark.parametrize("keys", [True, False])
def test_a_client_is_a_key_or_else_an_address(keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[str] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        owners.append(offload.owner.get())
        account_of(scope).hold(400)
        await asyncio.Event().wait()

    monkeypatch.setattr(limits, "Preparation", lambda: Preparation(8, 10**6))

    async def main() -> None:
        layer = Limits(app, ServeConfig())
        requests = [await stuck(layer, "192.0.2.1", "alice" if keys else ANONYMOUS) for _ in range(6)]
        assert [bool(sent) for _, sent in requests] == [False] * 4 + [True] * 2
        assert requests[-1][1][0]["status"] == 429
        name = "bob" if keys else ANONYMOUS
        other, sent = await stuck(layer, "192.0.2.1" if keys else "192.0.2.2", name)
        assert not sent
        assert owners == ["alice" if keys else "192.0.2.1"] * 4 + ["bob" if keys else "192.0.2.2"]
        for task in (other, *(task for task, _ in requests)):
            task.cancel()
        await asyncio.gather(*(task for task, _ in requests), other, return_exceptions=True)
        assert (layer._preparation.requests, layer._preparation.bytes) == ({}, {})

    asyncio.run(main())


def test_a_refused_request_takes_nothing() -> None:
    async def main() -> None:
        layer = Limits(lambda *_: asyncio.sleep(0), ServeConfig(requests_per_minute=1))
        for _ in range(5):
            task, _ = await stuck(layer, "192.0.2.1", "alice")
            await task
        assert not layer._preparation.requests

    asyncio.run(main())


# ---- long texts ----------------------------------------------------------------------------------


def encoder(characters_per_token: int) -> tuple[Callable[[str], list[int]], list[int]]:
    """A tokeniser, and how long the texts were that it got."""
    seen: list[int] = []

    def encode(text: str) -> list[int]:
        seen.append(len(text))
        return [1] * -(-len(text) // characters_per_token)

    return encode, seen


@pytest.mark.parametrize("characters", [1, 2, 5])
def test_a_text_far_too_long_is_not_tokenised_whole(characters: int) -> None:
    """Which would take memory of what the client chooses, not of what the model can read."""
    encode, seen = encoder(characters)
    with pytest.raises(ApiError) as error:
        _encode(encode, "x" * 10_000_000, 5000, "prompt")
    assert error.value.body.code == "context_length_exceeded" and "at least" in error.value.body.message
    assert max(seen) <= 5000 and sum(seen) <= 5000 + 6000 * characters


def test_a_text_of_long_tokens_is_taken() -> None:
    encode, seen = encoder(50)
    assert len(_encode(encode, "x" * 200_000, 5000, "prompt")) == 4000
    assert seen[-1] == 200_000 and max(seen[:-1]) <= 5000
    encode, seen = encoder(8)
    assert len(_encode(encode, "x" * 39_000, 5000, "prompt")) == 4875 and seen == [39_000]
