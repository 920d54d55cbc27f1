"""Models of two layers that use every kernel of a dense model once or twice: what compute-sanitizer can look at.

    python -m bench.reduced_model --prepare FOLDER --hw h200                    anywhere; needs the compiler wheels
    compute-sanitizer --tool memcheck --error-exitcode 9 \
        python -m bench.reduced_model --run FOLDER/llama-64 --quant bf16        on the device; racecheck alike

Widths are no multiples of tiles or groups, heads have 64 and 128 columns, and sequences share steps of 1, 3, 17 and 40
rows of generated tokens, some sampled with everything that sampling has. Exits 1 if a request fails, or if a batch
gives a greedy sequence other tokens than it gets alone; whether memory was touched that should not be is what the
sanitizer says.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from atlas.build.__main__ import main as compile_pack
from atlas.engine.engine import Engine
from atlas.engine.sampling import SamplingParams
from tests import family_models
from tests.models import run

QUANTS = ("bf16", "fp8", "nvfp4", "int4")

MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama-64": (
        QUANTS,
        {"hidden_size": 200, "intermediate_size": 456, "num_attention_heads": 6, "head_dim": 64},
    ),
    "qwen3-128": (
        ("bf16", "fp8"),
        {"hidden_size": 328, "intermediate_size": 584, "num_attention_heads": 4, "head_dim": 128},
    ),
}
"""Name, which begins with the family -> its quants, and what is changed of its config.json."""

BATCHES = (1, 3, 17, 40)
TOKENS = 4

OPTIONS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {7: 1.5},
    "logprobs": 3,
}


def prepare(folder: Path, hardware: str, quants: list[str]) -> int:
    """Write models and a kernel pack for each quant. The exit code."""
    for name, (served, changes) in MODELS.items():
        config = {**family_models.BASE, **family_models.FAMILIES[name.split("-")[0]], "num_hidden_layers": 2, **changes}
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(family_models.tensors(config, 7), folder / name / "model.safetensors", metadata={"format": "pt"})
        for quant in (quant for quant in quants if quant in served):
            pack = str(folder / name / f"{quant}.atlaspack")
            if code := compile_pack([str(folder / name), "--hw", hardware, "--quant", quant, "-o", pack]):
                return code
    return 0


def generate(engine: Engine, prompts: list[list[int]], sampled: int) -> list[list[int]]:
    """Tokens of all prompts together; every `sampled`-th is sampled with all options, the others are greedy."""
    results: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        options: dict[str, Any] = {**OPTIONS, "seed": i} if sampled and i % sampled == 1 else {}
        engine.add(str(i), prompt, SamplingParams(max_tokens=TOKENS, **options))
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            results[int(output.request_id)] += output.token_ids
    return results


def check(model: Path, quant: str, backend: str, batches: list[int]) -> bool:
    """Whether a greedy sequence got in a batch what it gets alone."""
    packs = (str(model / f"{quant}.atlaspack"),) if backend == "cuda" else ()
    rows = 64 if max(batches) > 16 else 16  # fewer variants to warm up: racecheck is slow
    sizes = {"max_seqs": rows, "max_rows": rows, "max_logits": rows, "max_context": 128, "kv_memory_bytes": 16 << 20}
    engine = Engine(run.load(model, backend, quant, kernel_packs=packs, **sizes))
    rng = np.random.default_rng()
    same = True
    for count in batches:
        lengths = [90, 1, 17, *rng.integers(1, 20, max(0, count - 3))][:count]
        prompts = [rng.integers(0, family_models.VOCAB, length).tolist() for length in lengths]
        together = generate(engine, prompts, sampled=4)
        same = same and generate(engine, prompts[:1], sampled=0)[0] == together[0]
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prepare", type=Path, metavar="FOLDER")
    what.add_argument("--run", type=Path, metavar="FOLDER/NAME")
    parser.add_argument("--hw", default="h200")
    parser.add_argument("--quant", default="", help=f"of {', '.join(QUANTS)}; --prepare: default all")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="sequences in a step")
    parser.add_argument("--backend", default="cuda")
    given = parser.parse_args()
    if given.prepare:
        return prepare(given.prepare, given.hw, given.quant.split(",") if given.quant else list(QUANTS))
    same = check(given.run, given.quant or "bf16", given.backend, [int(n) for n in given.batches.split(",")])
    print(f"{given.run.name} {given.quant}: a batch {'equals' if same else 'DIFFERS FROM'} each request alone")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
