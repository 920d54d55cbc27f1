"""`python -m atlas.serve` in a process of its own, on trained weights or others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import openai

from tests.serve.serve_harness import environment, eventually, free_port

MODEL = "smollm2-135m"


class ServerProcess:
    """One server process on a model. Output: `folder`/output.txt."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.output = folder / "output.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "atlas.serve", str(model), "--port", str(port), *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment(), "TMPDIR": str(folder)},
            )

    @contextmanager
    def started(self, timeout: float = 120) -> Generator[Self]:
        """Answers requests; ended afterwards."""
        try:
            eventually(self.healthy, timeout)
            yield self
        finally:
            self.close()

    def healthy(self) -> bool:
        """Whether it answers requests; fails if it has ended."""
        try:
            return httpx.get(self.url + "/health", timeout=5).status_code == 200
        except httpx.TransportError:
            assert self.process.poll() is None, self.output.read_text()
            return False

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait(10)


class RealServer(ServerProcess):
    """On the real model. It computes in bf16: its answers are known; those of the file's 4-bit blocks are a matter of
    luck."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        limits = ("--max-seqs", "12", "--max-context", "1024")
        super().__init__(folder, model, "--served-model-name", MODEL, "--quant", "bf16", *limits, *flags)
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=120)

    def info(self) -> dict[str, Any]:
        """What /server_info says."""
        result: dict[str, Any] = httpx.get(self.url + "/server_info", timeout=30).json()
        return result

    def chat(self, messages: Any, **options: Any) -> Any:
        """A chat completion by the official client."""
        return self.client.chat.completions.create(model=MODEL, messages=messages, **options)

    def idle(self, timeout: float = 20) -> dict[str, Any]:
        """Wait until no sequence runs or waits; the engine's numbers then."""

        def engine() -> dict[str, Any] | None:
            stats: dict[str, Any] = self.info()["engine"]
            return stats if stats["running"] == stats["waiting"] == 0 else None

        stats: dict[str, Any] = eventually(engine, timeout)
        return stats

    def close(self) -> None:
        """End the process."""
        self.client.close()
        super().close()
