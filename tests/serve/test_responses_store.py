"""The store of responses: what it keeps, for whom, and that it never grows beyond its bounds."""

from __future__ import annotations

import random

import pytest

from atlas.serve.openai.response_store import MemoryStore, Record


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def record(name: str, size: int = 10, previous: str | None = None, events: tuple[bytes, ...] = ()) -> Record:
    return Record(name, b"r" * size, b"i" * size, (f"item_of_{name}",), previous, events)


async def names(store: MemoryStore, client: str, name: str) -> list[str] | None:
    found = await store.history(client, name)
    return None if found is None else [one.id for one in found]


@pytest.mark.anyio
async def test_what_was_put_is_found_by_its_owner_alone() -> None:
    store = MemoryStore(10, 1 << 20)
    await store.put("ann", record("a"))
    assert (await store.get("ann", "a")) == record("a") == (await store.find_item("ann", "item_of_a"))
    for client in ("bob", "", "anonymous"):
        assert await store.get(client, "a") is None
        assert await store.history(client, "a") is None
        assert await store.find_item(client, "item_of_a") is None
        assert not await store.delete(client, "a")
    assert await store.get("ann", "a") is not None
    await store.put("bob", record("b", previous="a"))  # another's response is no beginning of a conversation
    assert await names(store, "bob", "b") == ["b"]


@pytest.mark.anyio
async def test_the_longest_unused_goes_first() -> None:
    store = MemoryStore(3, 1 << 20)
    for name in "abc":
        await store.put("ann", record(name))
    await store.get("ann", "a")
    await store.put("ann", record("d"))
    assert [name for name in "abcd" if await store.get("ann", name)] == ["a", "c", "d"]
    assert await store.find_item("ann", "item_of_b") is None


@pytest.mark.anyio
async def test_one_client_cannot_push_out_what_another_has() -> None:
    for store in (MemoryStore(10, 1 << 30), MemoryStore(1 << 30, 20 * record("0").size())):
        for name in "abc":
            await store.put("ann", record(name))
        for number in range(100):
            await store.put("bob", record(str(number)))
        assert all([await store.get("ann", name) for name in "abc"])
        assert await store.get("bob", "99") is not None and await store.get("bob", "0") is None


@pytest.mark.anyio
async def test_a_conversation_outlives_its_beginning() -> None:
    store = MemoryStore(2, 1 << 20)
    await store.put("ann", record("a"))
    await store.put("ann", record("b", previous="a"))
    await store.put("ann", record("c", previous="b"))
    assert await store.get("ann", "a") is None and store.count == 2
    assert await names(store, "ann", "c") == ["a", "b", "c"]
    assert await store.delete("ann", "b") and not await store.delete("ann", "b")
    assert await names(store, "ann", "b") is None
    assert await names(store, "ann", "c") == ["a", "b", "c"]
    assert await store.find_item("ann", "item_of_a") is not None
    assert await store.delete("ann", "c")
    assert (store.count, store.bytes) == (0, 0)
    assert await store.find_item("ann", "item_of_a") is None


@pytest.mark.anyio
async def test_a_beginning_that_went_while_it_was_continued_is_still_there() -> None:
    store = MemoryStore(10, 1 << 20)
    await store.put("ann", record("a"))
    await store.put("ann", record("b", previous="a"))
    history = await store.history("ann", "b")
    assert history is not None
    for name in "ab":
        assert await store.delete("ann", name)
    assert store.bytes == 0
    await store.put("ann", record("c", previous="b"), history)
    assert await names(store, "ann", "c") == ["a", "b", "c"]
    assert await store.get("ann", "b") is None and store.count == 1
    await store.delete("ann", "c")
    assert store.bytes == 0


@pytest.mark.anyio
async def test_what_is_larger_than_the_whole_store_is_not_kept() -> None:
    store = MemoryStore(10, 10_000)
    await store.put("ann", record("a", events=(b"e" * 20_000,)))
    assert await store.get("ann", "a") is None and store.bytes == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.anyio
async def test_whatever_happens_the_bounds_hold_and_nothing_is_counted_twice(seed: int) -> None:
    rng = random.Random(seed)
    store = MemoryStore(12, 40_000)
    known: list[tuple[str, str]] = []
    for number in range(600):
        client = rng.choice(("ann", "bob", "cy"))
        mine = [name for owner, name in known if owner == client]
        if mine and rng.random() < 0.25:
            await store.delete(client, rng.choice(mine[-20:]))
        elif mine and rng.random() < 0.2:
            await store.get(client, rng.choice(mine[-20:]))
        else:
            previous = rng.choice(mine[-20:]) if mine and rng.random() < 0.7 else None
            history = await store.history(client, previous) if previous else None
            await store.put(client, record(f"{number}", rng.randrange(1, 3000), previous), history or ())
            known.append((client, f"{number}"))
        assert 0 <= store.count <= 12 and 0 <= store.bytes <= 40_000
        # Counted from what can be reached, once each.
        there = [(owner, name) for owner, name in known if await store.get(owner, name)]
        reached = {}
        for owner, name in there:
            for one in await store.history(owner, name) or ():
                reached[id(one)] = one.size()
        assert (store.count, store.bytes) == (len(there), sum(reached.values()))
