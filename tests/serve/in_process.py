"""The whole server in the test's own process: real tokenizer, template, routes and layers on an engine that says what
it was told to. For tests of what becomes of thousands of answers; those of processes start `serve_harness` servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import Tokenizer as Library
from tokenizers import models

from atlas.api_keys import digest
from atlas.config import ServeConfig
from atlas.engine.messages import Ready, SamplingParams, SequenceOutput, TokenLogprobs
from atlas.serve.app import create_app
from atlas.serve.frontend import Frontend
from atlas.serve.service import Service, Serving
from tests.serve.serve_harness import EOT, SPECIAL, make_checkpoint

TEMPLATE = (
    "{{ bos_token }}{% if style is defined %}({{ style }}){% endif %}"
    "{% for t in tools or [] %}<|tool|>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.reasoning_content %}(thought {{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|eot|>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking %}START{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}START\n\nEND\n\n{% endif %}"
)
"""Tools, calls, and a switch of reasoning: on, the answer begins inside; off, after it; not said, the model decides."""


def template(start: str = "<think>", end: str = "</think>") -> str:
    return TEMPLATE.replace("START", start).replace("END", end)


def spelled(data: bytes) -> str:
    """Bytes as byte-level vocabularies spell them."""
    return "".join(_SPELLING[byte] for byte in data)


def _spelling() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_SPELLING = _spelling()


def make_model(
    folder: Path, *, pieces: Sequence[bytes] = (), special: Sequence[str] = (), chat_template: str | None = None
) -> Path:
    """A checkpoint like `make_checkpoint`'s, with tokens for these pieces of text, and with more special tokens."""
    make_checkpoint(folder, chat_template=template() if chat_template is None else chat_template)
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    for piece in pieces:
        vocab.setdefault(spelled(piece), len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(document))
    library = Library.from_file(str(folder / "tokenizer.json"))
    assert isinstance(library.model, models.BPE)
    library.add_special_tokens(list(special))
    library.save(str(folder / "tokenizer.json"))
    return folder


ANY = -1
"""A seed for requests of all others."""


class Engine:
    """Answers each request with what its seed stands for: ids, or groups of ids that arrive together."""

    state = "ready"

    def __init__(self) -> None:
        self.answers: dict[int, list[list[int]]] = {}
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.left = 0
        """Streams that were closed before their end."""
        self.delay = 0.0
        """Seconds before each output."""

    def submit(self, prompt: list[int], sampling: SamplingParams) -> _Stream:
        self.submitted.append((prompt, sampling))
        seed = sampling.seed if sampling.seed in self.answers else ANY
        return _Stream(self, self.answers[seed], prompt, sampling)


class _Stream:
    def __init__(self, engine: Engine, groups: list[list[int]], prompt: list[int], sampling: SamplingParams) -> None:
        self._engine, self._groups, self._sampling = engine, list(groups), sampling
        self._left = sampling.max_tokens
        self._prompt = [] if sampling.prompt_logprobs is None else prompt[1:]  # of these nothing has been told

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.left += bool(self._groups)

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> SequenceOutput:
        await asyncio.sleep(self._engine.delay)
        ids = self._groups.pop(0)[: self._left]
        self._left -= len(ids)
        stopped = bool(ids) and ids[-1] in self._sampling.stop_token_ids
        reason: Any = "stop" if stopped else None if self._left else "length"
        if reason is not None:
            self._groups.clear()
        told = () if self._sampling.logprobs is None else tuple(TokenLogprobs(i, -0.5, 1, [i], [-0.5]) for i in ids)
        prompt, self._prompt = tuple(TokenLogprobs(i, -0.25, 1, [i], [-0.25]) for i in self._prompt), []
        return SequenceOutput("r", ids, reason, logprobs=told, prompt_logprobs=prompt)


class Server:
    """`settings` are those of ServeConfig, such as tool_parser="hermes"."""

    def __init__(self, model: Path, *, keys: Sequence[str] = (), **settings: Any) -> None:
        config = ServeConfig(model=str(model), **settings)
        self.frontend = Frontend.load(model, config)
        self.engine = Engine()
        self.service = Service(config)
        ready = Ready("scripted", "none", "a test", 100_000, self.frontend.tokenizer.vocab_size, [])
        self.service.serving = Serving(self.engine, self.frontend, ready, "fp_test")  # type: ignore[arg-type]
        app = create_app(self.service, [digest(key.encode()) for key in keys], ["127.0.0.1"])
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        self.openai = openai.AsyncOpenAI(
            base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=self.http
        )
        self._vocab = self.frontend.tokenizer.show(frozenset()).get_vocab(with_added_tokens=False)

    def say(self, seed: int, *groups: Sequence[bytes | int], end: int | None = EOT) -> int:
        """Seed `seed` gets these tokens, each a piece of the vocabulary or an id; what stands in one group arrives
        together. Returns the seed."""
        ids = [
            [token if isinstance(token, int) else self._vocab[spelled(token)] for token in group] for group in groups
        ]
        self.engine.answers[seed] = ids if end is None else [*ids[:-1], [*ids[-1], end]]
        return seed

    def say_text(self, seed: int, text: str, *, group: int = 1, end: int | None = EOT) -> int:
        """The same, of one token a byte, or of a special token where the text has one."""
        ids = self.frontend.tokenizer.encode(text, add_special_tokens=False)
        groups = [ids[at : at + group] for at in range(0, len(ids), group)] or [[]]
        return self.say(seed, *groups, end=end)

    async def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def chat(self, **body: Any) -> dict[str, Any]:
        """A chat answer in one piece."""
        response = await self.post(**body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed one."""
        response = await self.post(stream=True, **body)
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def joined(chunks: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choice that chunks make, as an answer in one piece has it; checks the shape that OpenAI's have."""
    message: dict[str, Any] = {"role": None, "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert reason is None, "something follows the finish reason"
            delta, reason = choice["delta"], choice["finish_reason"]
            assert reason is None or delta == {}
            message["role"] = message["role"] or delta.get("role")
            message["content"] += delta.get("content") or ""
            if thought := delta.get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            for part in delta.get("tool_calls", []):
                if part["index"] == len(calls):
                    assert set(part) == {"index", "id", "type", "function"} and set(part["function"]) == {
                        "name",
                        "arguments",
                    }
                    calls.append({"id": part["id"], "function": part["function"], "type": part["type"]})
                else:
                    assert part["index"] == len(calls) - 1, "calls follow one another"
                    assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return {"index": index, "message": message, "finish_reason": reason, "logprobs": None}


__all__ = ["SPECIAL", "Engine", "Server", "joined", "make_model", "spelled", "template"]
