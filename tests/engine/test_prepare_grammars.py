"""The tokenizer of grammars in a whole engine process: read when it is needed, or before the engine is ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atlas.config import EngineConfig
from atlas.engine.client import EngineClient
from atlas.engine.messages import SamplingParams
from atlas.engine.sampling import Grammar
from tests import tiny_model
from tests.engine.grammar_model import byte_ids, tokenizer


@pytest.mark.parametrize("prepare", [False, True])
def test_a_grammar_in_an_engine_process(tmp_path: Path, prepare: bool) -> None:
    model = tiny_model.write(tmp_path)
    tokenizer().save(str(model / "tokenizer.json"))
    config = EngineConfig(model=str(model), backend="cpu", quant="f32", max_seqs=4, prepare_grammars=prepare)

    async def main() -> None:
        client = EngineClient(config)
        await client.start()
        try:
            ready = await asyncio.wait_for(client.wait_ready(), 60)
            assert ("grammars" in dict(ready.ledger)) is prepare
            for text, finish in (("abc", "stop"), ("a(", "error"), ("abc", "stop")):
                sampling = SamplingParams(max_tokens=9, grammar=Grammar("regex", text))
                tokens: list[int] = []
                with client.submit([1, 2], sampling) as stream:
                    async for output in stream:
                        tokens += output.token_ids
                assert output.finish_reason == finish, output
                assert tokens == (byte_ids(text) if finish == "stop" else []) and output.complete is (finish == "stop")
        finally:
            await client.shutdown()

    asyncio.run(main())
