"""The KV block pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.engine.kv_cache import BlockPool


def test_a_block_returns_when_its_last_owner_releases_it() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.share(first)
    pool.release([first, second])
    assert pool.free == 3
    pool.release([first])
    assert pool.free == 4
    pool.check_integrity()


def test_more_than_free_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match="2 KV blocks wanted, 1 free"):
        pool.allocate(2)
    assert pool.free == 1


def test_freeing_twice_and_sharing_a_free_block_are_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="already free"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(blocks[0])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 7)), max_size=60))
def test_owners_and_free_blocks_always_add_up(actions: list[tuple[str, int]]) -> None:
    pool, owned = BlockPool(8), []
    for action, value in actions:
        if action == "allocate" and value <= pool.free:
            owned += pool.allocate(value)
        elif owned:
            block = owned[value % len(owned)]
            if action == "share":
                pool.share(block)
                owned.append(block)
            elif action == "release":
                pool.release([block])
                owned.remove(block)
        assert pool.free == 8 - len(set(owned))
        pool.check_integrity()
