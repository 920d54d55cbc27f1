"""A tiny checkpoint, and the real server on the scripted engine in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import atlas

HERE = Path(__file__).parent
SPECIAL = ["<unk>", "<s>", "</s>", "<|eot|>", "<|user|>", "<|assistant|>", "<pad>"]
EOS, EOT = 2, 3
ANSWER = "Hi 😀é漢!"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'tool' and loop.first %}{{ raise_exception('a tool message cannot come first') }}{% endif %}"
    "<|{{ 'assistant' if m['role'] == 'assistant' else 'user' }}|>{{ m['content'] | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def ids_of(text: str) -> list[int]:
    """One id per byte of UTF-8: every place inside a character is a place between two tokens."""
    return [len(SPECIAL) + byte for byte in text.encode()]


def make_checkpoint(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, **generation: Any) -> Path:
    """A checkpoint whose tokenizer spells bytes; its weights are never read."""
    folder.mkdir(parents=True)
    alphabet = _byte_alphabet()
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    }
    documents = {
        "config.json": config,
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "generation_config.json": {"eos_token_id": [2, 3], **generation},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    save_file({"model.embed_tokens.weight": np.zeros((320, 8), np.float32)}, folder / "model.safetensors")
    return folder


def _byte_alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def behaviour(text: str, *, end: int | None = EOT, **options: Any) -> dict[str, Any]:
    """Say `text` and end the turn; with end=None say it for ever."""
    return {"tokens": ids_of(text) + ([] if end is None else [end]), **options}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(condition: Callable[[], Any], timeout: float = 5.0) -> Any:
    """The first true value of `condition`; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def environment() -> dict[str, str]:
    """Child processes import the same atlas as the tests."""
    return {**os.environ, "PYTHONPATH": str(Path(atlas.__file__).parents[1])}


class RunningServer:
    """One server process. `events` is what its engine saw."""

    def __init__(self, folder: Path, script: Mapping[str, Any], model: Path, *flags: str, port: int = 0) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "engine.jsonl"
        self.temp = folder / "tmp"
        self.temp.mkdir()
        path = folder / "script.json"
        path.write_text(json.dumps({**script, "log": str(self.log)}))
        command = [
            sys.executable,
            str(HERE / "serve_scripted.py"),
            str(path),
            "--port",
            str(self.port),
            *flags,
        ]
        self.output = folder / "output.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, str(model)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment(), "TMPDIR": str(self.temp)},
            )
        self.http = httpx.Client(base_url=self.url, timeout=10)

    def wait_ready(self) -> RunningServer:
        eventually(lambda: self.health() == 200 or self.process.poll() is not None, 20)
        assert self.process.poll() is None, self.output.read_text()
        # The ledger is printed just after.
        eventually(lambda: any(last in self.output.read_text() for last in ("curl ", '"message": "ready in')))
        return self

    def health(self) -> int | None:
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return None

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        entries = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [entry for entry in entries if kind in (None, entry["event"])]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=10)

    def engine_pid(self) -> int:
        """The last one that was started."""
        return self.engine_pids()[-1]

    def engine_pids(self) -> list[int]:
        return [entry["pid"] for entry in self.events("configure")]

    def leftovers(self) -> list[Path]:
        """Socket folders that a server left behind."""
        return list(self.temp.glob("atlas-*"))

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


Start = Callable[..., RunningServer]
