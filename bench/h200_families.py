"""Every family and option on a GPU: tiny models against transformers' float32 logits, and against `reference` buffer
by buffer.

    python -m bench.h200_families --prepare FOLDER [--hw h200]     anywhere; needs the compiler wheels
    python -m bench.h200_families --run FOLDER --out FILE.json     on the device

The first writes the models of tests/family_models.py and compiles a kernel pack for each in bf16, and in every quant
for those of QUANTS, and FP8 checkpoints that keep part of their MLPs in bf16 (MIXED). The second loads each on `cuda`
and compares logits (bf16), requests in a batch with the same alone, and after every launch of steps of both phases
all that it wrote. Models with experts have no CUDA kernels yet and are left out by name. `--only NAME.QUANT,...` takes
some. Exits 1 if anything is out of bounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from atlas.build.__main__ import main as compile_pack
from atlas.debug.compare import compare
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL
from tests import family_models
from tests.models import run
from tests.models.test_smollm2 import REL_L2_BF16, relative_l2
from tests.oracle.make_families_oracle import ORACLE, ROWS, SEED
from tests.oracle.make_tiny_oracle import ids
from tests.weights.quantized_files import float_quantized, write

SUFFIX = ".atlaspack"

QUANTS = {"llama-biases": ("fp8", "nvfp4", "int4"), "qwen3": ("fp8", "nvfp4", "int4"), "gemma3": ("fp8",)}
"""Case -> what it is run in besides bf16."""

MIXED = {"qwen3-down-in-bf16": ("down_proj",), "qwen3-gate-up-in-bf16": ("gate_proj", "up_proj")}
"""FP8 checkpoint -> projections that it keeps in bf16: the two products of its MLPs then take different types, and gate
and up are multiplied by a launch of their own."""

MANY = 100
"""Sequences of the last two steps: products of many rows are kernels of their own."""

STEPS = (
    (PHASE_PREFILL, (23, 7, 17), (0, 0, 0)),
    (PHASE_PREFILL, (9, 40), (7, 17)),
    (PHASE_DECODE, (1, 1, 1), (23, 16, 57)),
    (PHASE_DECODE, (1, 1, 1), (24, 17, 58)),
    (PHASE_PREFILL, (1,) * MANY, (0,) * MANY),
    (PHASE_DECODE, (1,) * MANY, (1,) * MANY),
)
"""Phase, rows of each sequence, and the positions of their first ones."""


def write_mixed(folder: Path, plain: tuple[str, ...]) -> Path:
    """The model `qwen3` in FP8 with one scale for each row, as compressed-tensors stores it, but for `plain`."""
    config, stored, ignored = family_models.config("qwen3"), dict[str, Any](), ["lm_head"]
    for name, array in family_models.tensors(config, SEED).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name] = array
        elif module.endswith(plain):
            stored[name] = array.astype(ml_dtypes.bfloat16)
            ignored.append(module)
        else:
            scales = np.abs(array).max(axis=1, keepdims=True) / 448
            stored[name] = (array / scales).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{module}.weight_scale"] = scales.astype(np.float32)
    quantization = float_quantized("channel")
    return write(folder, stored, config, **{**quantization, "ignore": ignored})


def prepare(folder: Path, hardware: str, only: list[str]) -> int:
    """Write models and packs, of `only` NAME.QUANT if it names some. The exit code."""
    models: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
        name: (lambda to, plain=plain: write_mixed(to, plain), ("fp8",))  # type: ignore[misc]
        for name, plain in MIXED.items()
    }
    for name, (kind, _) in family_models.CASES.items():
        if "moe" in kind:
            print(f"{name}: left out, models with experts have no CUDA kernels yet")
            continue
        quants = ("bf16", *QUANTS.get(name, ()))
        models[name] = (lambda to, name=name: family_models.write(to, name, SEED), quants)  # type: ignore[misc]
    for name, (write_to, quants) in models.items():
        for quant in quants:
            if only and f"{name}.{quant}" not in only:
                continue
            model = write_to(folder / name)
            pack = str(model / f"{quant}{SUFFIX}")
            if code := compile_pack([str(model), "--hw", hardware, "--quant", quant, "-o", pack]):
                return code
    return 0


def buffers(model: Path, quant: str, pack: str) -> dict[str, Any]:
    """Per op the launch whose output is furthest from `reference`, given the same inputs, and its error over the
    op's tolerance."""
    sizes = {"max_seqs": MANY, "max_rows": 128, "max_logits": MANY, "max_context": 128, "kv_memory_bytes": 16 << 20}
    cuda = run.load(model, "cuda", quant, kernel_packs=(pack,), **sizes)
    reference = run.load(model, "reference", quant, programs="cuda", **sizes)
    rng, worst = np.random.default_rng(), dict[str, Any]()
    for phase, lengths, begins in STEPS:
        block, rows, seqs = cuda.block, sum(lengths), len(lengths)
        block.set_symbols({"n_rows": rows, "n_seqs": seqs, "n_logits": seqs})
        block.set_phase(phase)
        block.row_token[:rows] = rng.integers(0, family_models.VOCAB, rows)
        block.row_seq[:rows] = np.repeat(np.arange(seqs), lengths)
        block.row_position[:rows] = np.concatenate(
            [np.arange(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)]
        )
        block.row_kind[:rows] = block.seq_rope[:seqs] = 0
        if seqs == MANY:  # a block for each
            table = np.arange(seqs)[:, None]
        else:  # the second step goes on with the second and the third sequence
            table = np.arange(3 * cuda.limits.max_blocks).reshape(3, -1)[-seqs:]
        block.block_table[:seqs] = table
        block.seq_slot[:seqs] = block.logit_slot[:seqs] = np.arange(seqs)
        block.logit_row[:seqs] = np.cumsum(lengths) - 1
        block.logit_position[:seqs] = np.add(begins, lengths)
        block.logit_adjust[:seqs] = block.logit_temperature[:seqs] = 0
        for name in ("logit_mask", "logit_n_top", "logit_target"):
            getattr(block, name)[:seqs] = -1
        for found in compare(cuda, reference):
            if found.ratio >= worst.get(found.op, {"error_over_tolerance": -1.0})["error_over_tolerance"]:
                worst[found.op] = {"error_over_tolerance": round(found.ratio, 4), "launch": found.launch}
    return worst


def check(model: Path, quant: str) -> dict[str, Any]:
    """One model: relative L2 of its logits, whether a row's bits depend on its batch, and every buffer."""
    pack = str(model / f"{quant}{SUFFIX}")
    runner = run.load(model, "cuda", quant, kernel_packs=(pack,))
    tokens = ids(family_models.VOCAB)
    result: dict[str, Any] = {}
    if quant == "bf16":
        with np.load(ORACLE) as oracle:
            expected = oracle[f"{model.name}.logits"]
        error = relative_l2(run.logits(runner, tokens, chunk=37)[list(ROWS)], expected)
        result["relative_l2"] = round(error, 5)
    prompts = [tokens[:length] for length in (40, 7, 90, 33)]
    alone = run.greedy(runner, prompts, 12, together=1)
    result["batch_equals_alone"] = run.greedy(runner, prompts, 12, together=4) == alone
    del runner
    result["buffers"] = buffers(model, quant, pack)
    result["passed"] = bool(
        result["batch_equals_alone"]
        and result.get("relative_l2", 0.0) <= REL_L2_BF16
        and all(each["error_over_tolerance"] <= 1 for each in result["buffers"].values())
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prepare", type=Path, metavar="FOLDER")
    what.add_argument("--run", type=Path, metavar="FOLDER")
    parser.add_argument("--hw", default="h200")
    parser.add_argument("--only", default="", help="comma list of NAME.QUANT")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    if given.prepare:
        return prepare(given.prepare, given.hw, only)
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found: dict[str, Any] = {}
    for pack in sorted(given.run.glob(f"*/*{SUFFIX}")):
        name = f"{pack.parent.name}.{pack.name.removesuffix(SUFFIX)}"
        if only and name not in only:
            continue
        try:
            found[name] = check(pack.parent, pack.name.removesuffix(SUFFIX))
        except Exception as error:  # one model's failure must not hide the others' results
            found[name] = {"error": f"{type(error).__name__}: {error}", "passed": False}
        print(name, json.dumps(found[name]), flush=True)
    passed = bool(found) and all(entry["passed"] for entry in found.values())
    document = {
        "what": "tiny models on a GPU: logits in bf16 against transformers float32, every buffer against NumPy",
        "commit": given.commit,
        "gpu": subprocess.run(smi, capture_output=True, text=True).stdout.strip(),
        "bound": REL_L2_BF16,
        "passed": passed,
        "models": found,
    }
    if given.out:
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
