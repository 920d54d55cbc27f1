"""The speed cases: prefill, decode, and a ladder over concurrency."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from atlas.bench import roofline
from atlas.bench.local import LocalTarget
from atlas.bench.records import Record, summarise
from atlas.errors import ConfigError
from atlas.progress import Progress


class Target(Protocol):
    """What can be measured: LocalTarget, RemoteTarget."""

    description: dict[str, Any]

    def prompts(self, count: int, tokens: int, seed: int) -> Sequence[Any]: ...
    def run(self, prompts: Sequence[Any], output_tokens: int, concurrency: int) -> list[Record]: ...
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Case:
    """kind: prefill, decode or ladder.  requests: in one repeat.  concurrency: of them at a time."""

    kind: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.prompt_tokens}+{self.output_tokens} x{self.concurrency}"


def cases(kind: str, prompt: Sequence[int], output: int, concurrency: Sequence[int], requests: int) -> list[Case]:
    """The cases of a command. prefill asks for one token; decode runs each concurrency as one batch; a ladder runs
    `requests` for each place, at least, so that finished requests are followed by others."""
    if kind == "prefill":
        return [Case(kind, tokens, 1, 1, 1) for tokens in prompt]
    if kind == "decode":
        return [Case(kind, tokens, output, c, c) for tokens in prompt for c in concurrency]
    return [Case(kind, tokens, output, c, c * requests) for tokens in prompt for c in concurrency]


def measure(
    target: Target,
    wanted: Sequence[Case],
    *,
    repeats: int,
    warm_up: int,
    seed: int,
    threads: int | None = None,
    report: Callable[[dict[str, Any]], None] = lambda result: None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Run the cases in order; each is warmed up, then repeated. Prompts are new in every repeat, and the same for the
    same seed. `report` gets each result as soon as it is there.

    Raises:
        ConfigError: a case does not fit the context.
    """
    progress = progress or Progress()
    local = target if isinstance(target, LocalTarget) else None
    if local is not None:
        for case in wanted:
            if case.prompt_tokens + case.output_tokens > local.llm.max_context:
                found = f"{case.prompt_tokens} + {case.output_tokens} tokens"
                raise ConfigError(case.kind, found, f"at most {local.llm.max_context}, the context")
    rates = None
    if local is not None:
        progress.begin("the machine's own rates", 1, "probe")
        rates = local.llm.engine_thread.call(lambda e: roofline.measured_rates(e.runner, threads))
    results = []
    for index, case in enumerate(wanted):
        runs: list[list[Record]] = []
        progress.begin(case.name, warm_up + repeats, "repeat")
        for repeat in range(-warm_up, repeats):
            prompts = target.prompts(case.requests, case.prompt_tokens, seed + 1000 * index + repeat + warm_up)
            run = target.run(prompts, case.output_tokens, case.concurrency)
            progress.advance(1)
            if repeat >= 0:
                runs.append(run)
        result = {
            "case": case.name,
            "asked": dataclasses.asdict(case),
            "concurrency": case.concurrency,
            **summarise(runs),
        }
        if local is not None and rates is not None:
            result["roofline"] = _roofline(local, case, result, rates)
        report(result)
        results.append(result)
    return results


def _roofline(
    target: LocalTarget, case: Case, result: dict[str, Any], rates: dict[str, float]
) -> dict[str, Any] | None:
    """From the best repeat: whatever else runs on a machine only ever makes it slower.

    A ladder's is of a whole request: its prompt by itself, then its share of steps of `concurrency` sequences.
    """
    call = target.llm.engine_thread.call
    prompt = call(lambda engine: roofline.prefill_cost(engine, case.prompt_tokens))
    position = case.prompt_tokens + case.output_tokens // 2
    decode = call(lambda engine: roofline.decode_cost(engine, case.concurrency, position))
    if case.kind == "prefill":
        rate, tokens, step = result["prefill_tokens_per_s"], case.prompt_tokens, prompt
    elif case.kind == "decode":
        rate, tokens, step = result["decode_tokens_per_s"], case.concurrency, decode
    else:
        rate, tokens = result["output_tokens_per_s"], case.output_tokens
        shares = [p + (tokens - 1) * d // case.concurrency for p, d in zip(prompt, decode, strict=True)]
        step = (shares[0], shares[1])
    if rate is None or not rate["max"]:
        return None
    return call(lambda engine: roofline.line(engine.runner, rates, step, tokens, rate["max"]))
