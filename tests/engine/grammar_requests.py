"""Requests with a grammar or thinking, and an engine that is run until they have ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.engine.sampling import Grammar, Thinking
from tests.engine.grammar_model import END_THINK, EOS, EOT, make

BACKENDS = ["reference", "cpu"]
MODES = [(0, 0), (1, 0), (0, 4), (1, 4), (2, 4)]
"""(steps ahead, rows of a decode step), as in test_ahead.py."""
BLOCK_BYTES = 2 * 2 * 2 * 16 * 32 * 4
THINKING = Thinking(end=(END_THINK,))


def params(syntax: str | None = None, text: Any = "", **given: Any) -> SamplingParams:
    text = text if isinstance(text, str) else json.dumps(text)
    fields: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "stop_token_ids": (EOS, EOT), **given}
    return SamplingParams(grammar=Grammar(syntax, text) if syntax else None, **fields)  # type: ignore[arg-type]


def finish(engine: Engine) -> dict[str, SequenceOutput]:
    """Step until idle; all outputs of each request as one."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(20_000):
        if not engine.busy:
            break
        for output in engine.step():
            parts = outputs.setdefault(output.request_id, [])
            assert not parts or parts[-1].finish_reason is None, "output after a finish reason"
            parts.append(output)
    assert not engine.busy and engine.pool.free == engine.pool.total
    return {name: SequenceOutput.join(parts) for name, parts in outputs.items()}


def run(engine: Engine, **requests: SamplingParams) -> dict[str, SequenceOutput]:
    for name, sampling in requests.items():
        engine.add(name, [1, 2, 3], sampling)
    return finish(engine)


def one(model: Path, sampling: SamplingParams, backend: str = "reference") -> SequenceOutput:
    return run(make(model, backend), only=sampling)["only"]
