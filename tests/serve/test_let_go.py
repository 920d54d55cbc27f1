"""While an answer is made, only what it needs is kept of its request: not the body, nor what was made of it."""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from atlas.serve.anthropic.requests import MessagesRequest
from atlas.serve.anthropic.translate import Translation
from atlas.serve.chat_generation import Plan
from atlas.serve.frontend import ChatPrompt
from atlas.serve.openai.embeddings import EmbeddingRequest
from atlas.serve.openai.requests import ChatRequest, CompletionRequest
from atlas.serve.openai.responses_conversation import Conversation
from atlas.serve.openai.responses_items import MessageItem
from atlas.serve.openai.responses_request import ResponseRequest
from atlas.text.messages import ChatMessage
from tests.serve.in_process import Server, make_model

KINDS = (
    *(MessagesRequest, Translation, Plan, ChatPrompt, ChatRequest, CompletionRequest, Conversation, ResponseRequest),
    *(MessageItem, ChatMessage, EmbeddingRequest),
)
MARK = "a sentence of the request that stands nowhere else "
YO: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": MARK}]}] * 40
SAID = [{"role": "user", "content": [{"type": "input_text", "text": MARK}]}] * 40
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": YO, "x": [MARK]}),
    "several": ("/v1/chat/completions", {"messages": YO, "n": 3}),
    "completions": ("/v1/completions", {"prompt": [MARK * 40], "x": [MARK]}),
    "responses": ("/v1/responses", {"input": SAID, "x": [MARK]}),
    "messages": ("/v1/messages", {"messages": YO, "max_tokens": 9, "x": [MARK]}),
    "embeddings": ("/v1/embeddings", {"input": [MARK * 40], "x": [MARK]}),
}

SEQUENCES = 2 * (1 + 3 + 1 + 1 + 1) + 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    server = Server(make_model(tmp_path_factory.mktemp("let_go") / "model"))
    server.engine.delay = 1000.0
    server.engine.answers = defaultdict(lambda: [[]])
    serving = server.service.require()
    ready = msgspec.structs.replace(serving.ready, embedding_size=8)
    server.service.serving = msgspec.structs.replace(serving, ready=ready)
    return server


def kept() -> list[str]:
    """What there is of requests. Of strings the collector knows nothing: they are found in what holds them."""
    found = []
    for thing in gc.get_objects():
        if type(thing) in KINDS:
            found.append(type(thing).__name__)
        elif type(thing) in (list, tuple):
            found += ["text" for part in thing if type(part) is str and part.startswith(MARK)]
        elif type(thing) is dict:
            found += ["field" for part in thing.values() if type(part) is str and part.startswith(MARK)]
    return found


def test_requests_are_let_go(server: Server) -> None:
    """All at once, streamed and not, for looking at all that there is takes its time."""
    asked = [(*REQUESTS[name], stream) for name in REQUESTS for stream in (False, True)]

    async def main() -> list[str]:
        tasks = [
            asyncio.create_task(server.post(path, **body, **({"stream": True} if stream else {})))
            for path, body, stream in asked
            if not (stream and path == "/v1/embeddings")
        ]
        for _ in range(500):
            await asyncio.sleep(0.01)
            if len(server.engine.submitted) == SEQUENCES:
                break
        assert not [(await task).text for task in tasks if task.done()]
        gc.collect()
        found = kept()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    gc.collect()
    gc.freeze()  # what tests hold themselves
    try:
        assert asyncio.run(main()) == []
    finally:
        gc.unfreeze()
