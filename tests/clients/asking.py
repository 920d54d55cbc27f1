"""What the tests of all clients ask, and how they put a stream together again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.serve.real_server import MODEL

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper and the sea."}]
EMOJI: Any = [{"role": "user", "content": "Repeat exactly: 😀 naïve café 漢字 😀"}]
TURNS: Any = [
    {"role": "user", "content": "The secret word is Zorblax."},
    {"role": "assistant", "content": "The secret word is Zorblax."},
    {"role": "user", "content": "What is the secret word?"},
]
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 12}
SAMPLED: Any = {"model": MODEL, "temperature": 1.0, "max_tokens": 12}


class Gathered:
    """The choices of a stream of chat chunks, each as if it had come whole."""

    def __init__(self, chunks: Iterable[Any]) -> None:
        self.text: dict[int, str] = {}
        self.finish: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.roles: dict[int, list[str]] = {}
        self.usage: Any = None
        self.frames: set[tuple[Any, ...]] = set()
        for chunk in chunks:
            self.frames.add((chunk.id, chunk.object, chunk.created, chunk.model, chunk.system_fingerprint))
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                index, delta = choice.index, choice.delta
                assert index not in self.finish, "a chunk after the one that ends its choice"
                self.text[index] = self.text.get(index, "") + (delta.content or "")
                if delta.role is not None:
                    self.roles.setdefault(index, []).append(delta.role)
                if choice.logprobs:
                    self.logprobs.setdefault(index, []).extend(choice.logprobs.content)
                if choice.finish_reason is not None:
                    self.finish[index] = choice.finish_reason
