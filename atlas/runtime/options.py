"""How a runner is asked to run a model."""

from __future__ import annotations

import dataclasses

from atlas.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class RunnerOptions:
    """How to run a model; None lets the runner decide.

    max_context: tokens of one sequence.
    max_seqs: sequences in one step (default 32, on a GPU 256).
    max_rows: rows in one step (default 512, on a GPU 8192).
    max_logits: rows of one step whose logits are computed (default max_seqs).
    kv_dtype: format of the KV cache (default the quant recipe's).
    kv_memory_bytes: size of the KV cache.  level: CPU instruction-set level.
    kernel_packs: files with kernels, one of which must serve.
    programs: "cuda" lets `reference` run the programs of a GPU that has every kernel, fused launches and all.
    """

    backend: str = "auto"
    quant: str | None = None
    kv_dtype: str | None = None
    threads: int | None = None
    level: str = ""
    max_context: int | None = None
    max_seqs: int | None = None
    max_rows: int | None = None
    max_logits: int | None = None
    kv_memory_bytes: int | None = None
    kernel_packs: tuple[str, ...] = ()
    programs: str = ""

    @classmethod
    def of(cls, config: EngineConfig) -> RunnerOptions:
        """The runner's part of the engine's settings."""
        return cls(
            backend=config.backend,
            quant=config.quant,
            kv_dtype=config.kv_dtype,
            threads=config.threads,
            max_context=config.max_context,
            max_seqs=config.max_seqs,
            max_rows=config.max_rows,
            kv_memory_bytes=config.kv_memory_bytes,
            kernel_packs=config.kernel_packs,
        )
