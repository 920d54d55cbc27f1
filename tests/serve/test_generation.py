"""Generation when the engine is not there any more, and when nobody reads."""

from __future__ import annotations

import asyncio

import pytest

from atlas.config import EngineConfig
from atlas.engine.client import EngineClient
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.serve.access.limits import Account
from atlas.serve.errors import ApiError
from atlas.serve.generation import Job, collect, generate_all
from atlas.text.assembler import TextStream


class NoTokenizer:
    def stream(self, shown: frozenset[str] = frozenset()) -> TextStream:
        class Nothing:
            def push(self, token_ids: object) -> str:
                return ""

            def finish(self) -> str:
                return ""

        return Nothing()


@pytest.mark.parametrize("prompts", [1, 3])
def test_an_engine_that_died_meanwhile_is_a_503(prompts: int) -> None:
    async def main() -> ApiError:
        client = EngineClient(EngineConfig(model="/m"))
        await client.shutdown()
        jobs = [Job(index, [1], SamplingParams(max_tokens=1), ()) for index in range(prompts)]
        with pytest.raises(ApiError) as error:
            await collect(client, NoTokenizer(), jobs, Account())
        return error.value

    error = asyncio.run(main())
    assert (error.status, error.body.code) == (503, "engine_unavailable")
    assert "shut down" in error.body.message and error.headers["Retry-After"]


@pytest.mark.parametrize("choices", [1, 3])
def test_what_a_slow_reader_leaves_becomes_few_deltas(choices: int) -> None:
    """Tokens that nobody has taken are kept as tokens, and not each as an event of its own."""

    async def main() -> list[tuple[int, int]]:
        client = EngineClient(EngineConfig(model="/m"))
        client.state = "ready"
        jobs = [Job(index, [1], SamplingParams(max_tokens=1000), ()) for index in range(choices)]
        deltas, got = generate_all(client, NoTokenizer(), jobs, Account()), []

        async def read() -> None:
            async for delta in deltas:
                got.append((delta.index, delta.tokens))
                await asyncio.sleep(0.05)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        for token in range(1000):
            for stream in list(client._streams.values()):
                stream.push(SequenceOutput(stream.request_id, [5], "length" if token == 999 else None))
            await asyncio.sleep(0)
        await reading
        return got

    got = asyncio.run(main())
    for index in range(choices):
        assert sum(tokens for owner, tokens in got if owner == index) == 1000
    assert len(got) <= 4 * choices
