"""The real engine under load: 512 streams at once of a small model, on the CPU."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.real_server import RealServer
from tests.serve.serve_harness import eventually

STREAMS, TOKENS = 512, 16

pytestmark = pytest.mark.load


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RealServer]:
    running = RealServer(tmp_path_factory.mktemp("load"), smollm2_path, "--max-seqs", "64", "--kv-memory", "48MiB")
    try:
        eventually(running.healthy, 120)
        yield running
    finally:
        running.close()


def test_512_streams_are_what_each_is_alone(server: RealServer) -> None:
    """A prompt of token ids, sampled with a seed and greedy: the same text from one stream alone and from 512 at once,
    and usage counts every token."""
    draw = random.Random(5)
    prompts = [[draw.randrange(100, 40_000) for _ in range(draw.randrange(2, 40))] for _ in range(32)]
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": index % 2, "seed": index}
        for index, prompt in enumerate(prompts)
    ]

    async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, int, str]:
        text, tokens, reason = "", 0, ""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json={**body, **options}) as response:
            lines = [line async for line in response.aiter_lines() if line and not line.startswith(":")]  # comments
        assert response.status_code == 200 and lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                text, reason = text + choice["text"], choice["finish_reason"] or reason
            tokens = (chunk["usage"] or {}).get("completion_tokens", tokens)
        return text, tokens, reason

    async def run() -> None:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
            alone = [await stream(client, body) for body in bodies]
            assert len({text for text, _, _ in alone}) > 24
            order = [index % len(bodies) for index in range(STREAMS)]
            draw.shuffle(order)
            together = await asyncio.gather(*(stream(client, bodies[index]) for index in order))
        for index, got in zip(order, together, strict=True):
            assert got == alone[index] and got[1:] == (TOKENS, "length")

    asyncio.run(run())
    assert server.idle()["free_blocks"] == server.idle()["total_blocks"]
