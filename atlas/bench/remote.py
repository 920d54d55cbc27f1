"""Any OpenAI-compatible server under load: streamed completions, one thread for each request under way."""

from __future__ import annotations

import http.client
import json
import queue
import random
import ssl
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from atlas.bench.records import Record
from atlas.errors import AtlasError, ConfigError

_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)
"""Common words: one token each, more or less, in every vocabulary of English."""


class RemoteTarget:
    """A server by its base URL, such as http://127.0.0.1:8000/v1.

    Raises:
        ConfigError: a URL that is none, or a server that lists no model where none was named.
    """

    def __init__(self, url: str, api_key: str, model: str | None, ignore_eos: bool, timeout: float) -> None:
        parts = urllib.parse.urlsplit(url.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--url", repr(url), "such as http://127.0.0.1:8000/v1")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path, self._timeout, self._ignore_eos = parts.path, timeout, ignore_eos
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model or self._first_model()
        self.description: dict[str, Any] = {"kind": "OpenAI-compatible server", "url": url, "model": self._model}

    def prompts(self, count: int, tokens: int, seed: int) -> list[str]:
        """Random words, about so many tokens; the records say how many the server counted."""
        rng = random.Random(seed)
        return [" ".join(rng.choices(_TEXT.split(), k=max(1, tokens - 1))) for _ in range(count)]

    def run(self, prompts: Sequence[Any], output_tokens: int, concurrency: int) -> list[Record]:
        """All prompts, `concurrency` at a time. A request that fails is a record with an error."""
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for prompt in prompts:
            waiting.put(prompt)
        records: list[Record] = []

        def follow() -> None:
            while True:
                try:
                    prompt = waiting.get_nowait()
                except queue.Empty:
                    return
                records.append(self._request(prompt, output_tokens))

        threads = [threading.Thread(target=follow, daemon=True) for _ in range(min(concurrency, len(prompts)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(records, key=lambda record: record.submitted)

    def close(self) -> None:
        """Nothing is held open between requests."""

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            connection.request("GET", self._path + "/models", headers=self._headers)
            response = connection.getresponse()
            body = response.read(1 << 20)
            if response.status != 200:
                fix = "" if self._path.endswith("/v1") else "most servers' base URL ends in /v1"
                found = f"{self._path}/models answers {response.status}: {body[:200].decode(errors='replace')}"
                raise ConfigError("--url", found, fix=fix)
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise AtlasError("--url", f"{self._host}:{self._port or ''}: {error}", fix="is the server up?") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError(
                "--url", "/models is no list of models", fix="name the model with --served-model"
            ) from None
        finally:
            connection.close()

    def _request(self, prompt: str, output_tokens: int) -> Record:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        record = Record(time.perf_counter())
        connection = self._connect()
        try:
            connection.request("POST", self._path + "/completions", json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(2000).decode(errors="replace")
                record.error = f"HTTP {response.status}: {text[:200]}"
            else:
                self._follow(response, record)
        except (OSError, http.client.HTTPException, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        record.finished = time.perf_counter()
        if not record.error and not record.arrivals:
            record.error = "the stream had no text"
        return record

    def _follow(self, response: http.client.HTTPResponse, record: Record) -> None:
        """Read a stream of events to its `[DONE]`."""
        ended = False
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                ended = True
                break
            event = json.loads(data)
            if "error" in event:
                record.error = str(event["error"].get("message", event["error"]))[:200]
                return
            if any(choice.get("text") for choice in event.get("choices") or []):
                record.arrivals.append(time.perf_counter())
            if usage := event.get("usage"):
                record.prompt_tokens, record.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if not ended:
            record.error = "the stream ended without [DONE]"
        elif not record.tokens:
            record.tokens = len(record.arrivals)  # no usage: a chunk is taken as one token
