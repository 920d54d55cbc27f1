"""The in-process engine under load: exact prompt lengths, and times from the engine's own thread."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas.bench.records import Record
from atlas.engine.messages import SamplingParams
from atlas.errors import AtlasError
from atlas.llm import LLM
from atlas.llm.engine_thread import Mailbox, Submission


class LocalTarget:
    """An LLM as something to measure. One caller follows all requests, so that measuring costs one thread only."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.description: dict[str, Any] = {
            "kind": "in-process engine",
            "model": llm.model,
            "backend": llm.backend,
            "kernel_set": llm.kernel_set,
            "max_context": llm.max_context,
        }

    def prompts(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        """Random ids, exactly so many. A new seed gives prompts that no cache has seen."""
        rng = np.random.default_rng(seed)
        return [rng.integers(0, self.llm.vocab_size, tokens).tolist() for _ in range(count)]

    def run(self, prompts: Sequence[Any], output_tokens: int, concurrency: int) -> list[Record]:
        """All prompts, `concurrency` at a time: when one ends, the next is submitted. Greedy, to full length."""
        sampling = SamplingParams(max_tokens=output_tokens)
        mailbox: Mailbox = queue.SimpleQueue()
        records: list[Record] = []
        running: dict[str, tuple[Record, Submission]] = {}
        waiting = list(prompts)[::-1]
        try:
            while waiting or running:
                while waiting and len(running) < concurrency:
                    prompt = waiting.pop()
                    submission = self.llm.engine_thread.submission(1)
                    submission.mailbox = mailbox
                    record = Record(time.perf_counter(), len(prompt))
                    records.append(record)
                    running[submission.request_ids[0]] = (record, submission)
                    submission.send([prompt], [sampling])
                message = mailbox.get()
                if isinstance(message, AtlasError):
                    raise message
                for arrival in message:
                    output = arrival.output
                    record = running[output.request_id][0]
                    record.tokens += len(output.token_ids)
                    record.arrivals += [arrival.time] * len(output.token_ids)
                    if output.finish_reason is not None:
                        record.error = output.error or ""
                        record.finished = arrival.time
                        del running[output.request_id]
        finally:
            for _, submission in running.values():
                submission.abort_all()
        return records

    def close(self) -> None:
        self.llm.close()
