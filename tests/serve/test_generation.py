"""Generation when the engine is not there any more."""

from __future__ import annotations

import asyncio

import pytest

from atlas.config import EngineConfig
from atlas.engine.client import EngineClient
from atlas.engine.messages import SamplingParams
from atlas.serve.errors import ApiError
from atlas.serve.generation import Job, collect
from atlas.serve.limits import Account
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
