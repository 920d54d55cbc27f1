"""The scheduler alone: no device, tokens made up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.engine.kv_cache import BlockPool
from atlas.engine.messages import SamplingParams
from atlas.engine.scheduler import Scheduler
from atlas.engine.sequence import Sequence


def sequence(name: str, prompt: int, prompt_logprobs: int | None = None, priority: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=1000, prompt_logprobs=prompt_logprobs, priority=priority)
    return Sequence(name, prompt, list(range(prompt)), params)


def advance(scheduler: Scheduler) -> dict[str, int]:
    """Schedule a step and pretend that it ran; rows by request."""
    plan = scheduler.schedule()
    assert plan is not None
    chunks = plan.chunks
    for chunk in chunks:
        samples = chunk.samples
        chunk.sequence.computed += chunk.rows
        if samples:
            chunk.sequence.tokens.append(0)
            chunk.sequence.length += 1
    return {chunk.sequence.request_id: chunk.rows for chunk in chunks}


def test_decoding_rows_come_first_and_prompts_fill_the_rest() -> None:
    scheduler = Scheduler(BlockPool(64), max_rows=32, max_seqs=4, n_slots=4, max_logits=8)
    scheduler.add(sequence("a", 5))
    assert advance(scheduler) == {"a": 5}
    scheduler.add(sequence("b", 50))
    scheduler.add(sequence("c", 10))
    assert advance(scheduler) == {"a": 1, "b": 31}
    assert advance(scheduler) == {"a": 1, "b": 19, "c": 10}
    assert advance(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_no_more_sequences_than_slots() -> None:
    scheduler = Scheduler(BlockPool(64), max_rows=32, max_seqs=8, n_slots=2, max_logits=8)
    for name in "abc":
        scheduler.add(sequence(name, 4))
    assert advance(scheduler) == {"a": 4, "b": 4}
    scheduler.remove(scheduler.running[0])
    assert advance(scheduler) == {"b": 1, "c": 4}


def test_the_latest_admission_is_preempted_and_comes_back_whole() -> None:
    scheduler = Scheduler(BlockPool(4), max_rows=64, max_seqs=4, n_slots=4, max_logits=8)
    first, second = sequence("a", 31), sequence("b", 30)
    scheduler.add(first)
    scheduler.add(second)
    assert advance(scheduler) == {"a": 31, "b": 30}
    assert advance(scheduler) == {"a": 1, "b": 1}  # 32 and 31 tokens: two blocks each, none free
    assert advance(scheduler) == {"a": 1}  # the 33rd token of a takes a block from b
    assert scheduler.preemptions == 1 and second.slot == -1 and second.computed == 0 and second.blocks == []
    assert len(second.tokens) == 32 and list(scheduler.waiting) == [second]
    scheduler.remove(first)
    assert advance(scheduler) == {"b": 32}


def test_a_preempted_sequence_comes_back_before_those_that_never_ran() -> None:
    scheduler = Scheduler(BlockPool(4), max_rows=64, max_seqs=2, n_slots=2, max_logits=8)
    first, second, third = sequence("a", 32), sequence("b", 31), sequence("c", 1)
    for s in (first, second, third):
        scheduler.add(s)
    advance(scheduler)
    assert advance(scheduler) == {"a": 1} and list(scheduler.waiting) == [second, third]
    scheduler.remove(first)
    assert advance(scheduler) == {"b": 32, "c": 1}


def test_a_lower_priority_number_is_admitted_first() -> None:
    scheduler = Scheduler(BlockPool(64), max_rows=8, max_seqs=1, n_slots=1, max_logits=8)
    order = [("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1), ("f", 5)]
    for name, priority in order:
        scheduler.add(sequence(name, 4, priority=priority))
    admitted = []
    while names := advance(scheduler):
        admitted += names
        scheduler.remove(scheduler.running[0])
    assert admitted == ["c", "e", "a", "d", "b", "f"]


def test_rows_of_a_step_go_to_the_lower_priority_number_first() -> None:
    scheduler = Scheduler(BlockPool(64), max_rows=8, max_seqs=4, n_slots=4, max_logits=8)
    scheduler.add(sequence("a", 12, priority=1))
    assert advance(scheduler) == {"a": 8}
    scheduler.add(sequence("b", 12, priority=0))
    assert advance(scheduler) == {"a": 4, "b": 4}  # nobody who runs is stopped for it
    scheduler.add(sequence("c", 12, priority=1))
    assert advance(scheduler) == {"a": 1, "b": 7}
    assert list(advance(scheduler)) == ["b", "a", "c"]


def test_the_highest_priority_number_is_preempted() -> None:
    """Although it was admitted before those that stay; and it waits behind whoever is more urgent."""
    scheduler = Scheduler(BlockPool(6), max_rows=64, max_seqs=4, n_slots=4, max_logits=8)
    low, first, second = sequence("low", 20, priority=9), sequence("a", 31), sequence("b", 30)
    for s in (low, first, second):
        scheduler.add(s)
    assert advance(scheduler) == {"a": 31, "b": 30, "low": 3}
    while scheduler.preemptions == 0:
        advance(scheduler)
    assert list(scheduler.waiting) == [low] and scheduler.running == [first, second]
    scheduler.add(sequence("new", 4, priority=1))
    scheduler.add(sequence("same", 4, priority=9))
    assert [s.request_id for s in scheduler.waiting] == ["new", "low", "same"]


def test_a_sequence_that_outgrows_its_rope_set_is_computed_again() -> None:
    """As a fresh prefill of the longer text would be, in the blocks and the slot that it has."""
    scheduler = Scheduler(BlockPool(8), 20, 2, 2, max_logits=2, rope_set=lambda length: int(length > 32))
    crossing, short, long = sequence("a", 31), sequence("b", 2), sequence("c", 33)
    scheduler.add(crossing)
    scheduler.add(short)
    assert advance(scheduler) == {"a": 20}
    assert advance(scheduler) == {"a": 11, "b": 2}  # 32 tokens
    assert advance(scheduler) == {"b": 1, "a": 1} and (crossing.rope_set, len(crossing.tokens)) == (0, 33)
    blocks, slot = list(crossing.blocks), crossing.slot
    crossing.last_token_on_device = True
    assert advance(scheduler) == {"b": 1, "a": 19}
    assert (crossing.rope_set, crossing.computed, crossing.last_token_on_device) == (1, 19, False)
    assert crossing.slot == slot and crossing.blocks[:2] == blocks[:2]
    assert advance(scheduler) == {"b": 1, "a": 14} and len(crossing.tokens) == 34
    assert advance(scheduler) == {"a": 1, "b": 1} and short.rope_set == 0
    assert scheduler.preemptions == 0
    for s in (crossing, short):
        scheduler.remove(s)
    scheduler.add(long)
    assert long.rope_set == 1 and advance(scheduler) == {"c": 20}
    scheduler.remove(long)
    assert scheduler.pool.free == scheduler.pool.total


def test_removing_a_waiting_sequence_leaves_the_pool_alone() -> None:
    scheduler = Scheduler(BlockPool(4), max_rows=8, max_seqs=1, n_slots=1, max_logits=8)
    first, second = sequence("a", 4), sequence("b", 4)
    scheduler.add(first)
    scheduler.add(second)
    advance(scheduler)
    scheduler.remove(second)
    scheduler.remove(first)
    assert scheduler.pool.free == 4 and advance(scheduler) == {}


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    finish=st.lists(st.integers(1, 40), min_size=12, max_size=12),
    blocks=st.integers(9, 30),
    max_rows=st.integers(8, 64),
    max_logits=st.integers(8, 40),
    priorities=st.lists(st.integers(-1, 1), min_size=12, max_size=12),
)
def test_every_sequence_finishes_and_every_block_comes_back(
    prompts: list[int], finish: list[int], blocks: int, max_rows: int, max_logits: int, priorities: list[int]
) -> None:
    """Random loads, with preemption: a step never exceeds its budgets, never runs a sequence without
    the blocks for its rows, and no two sequences own one block. Nobody waits who was put back for one that is less
    urgent. Every second sequence wants its prompt's
    log-probabilities: each token but the first is a target once, in order."""
    pool = BlockPool(blocks)
    scheduler = Scheduler(pool, max_rows=max_rows, max_seqs=8, n_slots=8, max_logits=max_logits)
    live = [sequence(str(i), prompt, i % 2 or None, priorities[i]) for i, prompt in enumerate(prompts)]
    targets: dict[str, list[int]] = {s.request_id: [] for s in live}
    arriving = list(live)
    for step in range(5000):
        if not live:
            break
        if arriving and (step % 3 == 0 or not scheduler.running):
            scheduler.add(arriving.pop(0))
        before = list(scheduler.running)
        plan = scheduler.schedule()
        assert plan is not None
        chunks = plan.chunks
        assert 0 < sum(chunk.rows for chunk in chunks) <= max_rows
        assert sum(chunk.sequence.logit_rows(chunk.rows) for chunk in chunks) <= max_logits
        for queue in (scheduler.running, scheduler.waiting):
            assert [s.sampling.priority for s in queue] == sorted(s.sampling.priority for s in queue)
        back = [s.sampling.priority for s in before if s.slot < 0]
        assert not back or min(back) >= max((s.sampling.priority for s in scheduler.running), default=-9)
        owned = [block for s in scheduler.running for block in s.blocks]
        assert len(owned) == len(set(owned)) == pool.total - pool.free
        for chunk in chunks:
            s = chunk.sequence
            assert s in scheduler.running and s.slot >= 0 and chunk.rows >= 1
            assert s.computed + chunk.rows <= min(len(s.blocks) * 16, len(s.tokens))
        assert len({chunk.sequence.slot for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            s, samples = chunk.sequence, chunk.samples
            for target in s.prompt_targets(chunk.rows):
                targets[s.request_id].append(target)
                s.prompt_reported = target + 1
            s.computed += chunk.rows
            if samples:
                s.tokens.append(0)
                s.length += 1
                if s.generated >= min(finish[int(s.request_id)], 16 * blocks - s.prompt_length):
                    scheduler.remove(s)
                    live.remove(s)
    assert not live and pool.free == pool.total
    pool.check_integrity()
    for i, prompt in enumerate(prompts):
        assert targets[str(i)] == (list(range(1, prompt)) if i % 2 else [])
