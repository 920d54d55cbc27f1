"""Real weights on a GPU against transformers, each format on the very weights that Atlas serves in it.

    pip install '.[oracle]' && python -m bench.real_weights oracle FOLDER        anywhere: what should come out
    python -m bench.real_weights device FOLDER --packs PACKS --out FILE.json     on the device; no transformers there

`oracle` dequantises what Atlas makes of each matrix (the `reference` backend, with the GPU's formats), gives it to
transformers in float32, and keeps in FOLDER/oracle.npz, per case:
    CASE.nll     float32 [windows, T - 1], negative log-likelihood of the windows' tokens
    CASE.weights CRC of every matrix as Atlas holds it
and for bf16 64 greedy tokens on 20 prompts with each token's lead over the runner-up. `f32` is the checkpoint itself,
read by transformers' own reader. In fp8 the rows that enter a product are rounded to E4M3 first, as Atlas does.

`device` scores the same windows twice, in steps of prompts and in steps of generated tokens (one row of every window
at a time), and holds perplexities to BOUNDS. Greedy tokens must agree but where the oracle's lead is within the noise,
which is measured: the largest error of a lead where both sides prefer the same token, but no more than LEAD_NOISE.

The catalogue's checkpoint holds 4-bit blocks. Case `int4-blocks` serves them as they are; what Atlas quantises itself
starts from the same values in bf16, written to FOLDER/bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from atlas.llm.scoring import mean_interval, token_nll
from atlas.models import family_of
from atlas.runtime.headers import untied
from atlas.runtime.runner import Runner
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL
from atlas.targets.shape import Shard
from atlas.weights import open_checkpoint
from atlas.weights.fetch import resolve_model
from tests.models import run
from tests.models.test_smollm2 import LEAD_NOISE
from tests.oracle.prompts import CHAT, GREEDY_PROMPTS, GREEDY_TOKENS

Array = np.ndarray[Any, Any]

TEXT = Path(__file__).with_name("texts") / "time_machine.txt"
WINDOWS, WINDOW = 8, 640
"""Windows of the text and their tokens, at most; a window's first token is given, the others are scored."""

CASES = {
    "bf16": ("bf16", "file"),
    "fp8": ("fp8", "bf16"),
    "nvfp4": ("nvfp4", "bf16"),
    "int4": ("int4", "bf16"),
    "int4-blocks": ("int4", "file"),
}
"""Case -> recipe, and what is loaded: the checkpoint's file or its values in bf16."""

BOUNDS = {"bf16": 0.1, "fp8": 0.5, "nvfp4": 0.5, "int4": 0.5}
"""Percent by which a perplexity may differ from the oracle's, by recipe."""


def load(path: Path, backend: str, quant: str, **options: Any) -> Runner:
    sizes = {"max_seqs": 32, "max_rows": 256, "max_logits": 256, "max_context": 1024, "kv_memory_bytes": 1 << 30}
    return run.load(path, backend, quant, **{**sizes, **options})


def in_bf16(file: Path, folder: Path) -> Path:
    """The checkpoint with all its values rounded to bf16, as safetensors; written once."""
    import torch
    from safetensors.torch import save_file

    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open_checkpoint(file) as checkpoint:
            values = {name: np.array(checkpoint.read(name), np.float32) for name in checkpoint.tensors}
            (folder / "config.json").write_text(json.dumps(checkpoint.config | {"torch_dtype": "bfloat16"}))
        save_file({n: torch.from_numpy(v).bfloat16() for n, v in values.items()}, folder / "model.safetensors")
    return folder


def matrices(runner: Runner, path: Path) -> dict[str, tuple[tuple[str, ...], Array]]:
    """Weight buffer -> the checkpoint's names of its parts, and its values, dequantised float32."""
    with open_checkpoint(path) as checkpoint:
        family = family_of(checkpoint.config)
        config = untied(checkpoint, family.configure(checkpoint.config, Shard()), family)
        sources = family.weights(config, checkpoint.tensors)
    return {
        name: (source.tensors, np.ascontiguousarray(runner.read(name), np.float32))
        for name, source in sources.items()
        if source.tensors and len(runner.buffers[name].shape) == 2
    }


def checksum(values: dict[str, tuple[tuple[str, ...], Array]]) -> int:
    result = 0
    for _, array in values.values():
        result = zlib.crc32(array.tobytes(), result)
    return result


# ---- oracle --------------------------------------------------------------------------------------


def transformers_model(runner: Runner, path: Path) -> tuple[Any, int]:
    """transformers' model in float32 with the matrices that `runner` holds; their checksum."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with open_checkpoint(path) as checkpoint:
        config = dict(checkpoint.config)
        state = {name: torch.from_numpy(np.array(checkpoint.read(name), np.float32)) for name in checkpoint.tensors}
    held = matrices(runner, path)
    for names, values in held.values():
        parts = np.split(values, np.cumsum([len(state[name]) for name in names])[:-1])
        state |= {name: torch.from_numpy(part.copy()) for name, part in zip(names, parts, strict=True)}
    kind = config.pop("model_type", "llama")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval(), checksum(held)


def round_activations(model: Any) -> None:
    """Round what enters every product of the layers: E4M3, a scale for each row and 128 columns."""
    import torch

    def rounded(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = inputs
        groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
        largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
        codes = (groups * (448 / largest)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return ((codes * (largest / 448)).flatten(-2)[..., : x.shape[-1]],)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            module.register_forward_pre_hook(rounded)


def oracle_nll(model: Any, windows: Array) -> Array:
    import torch

    rows = []
    with torch.inference_mode():
        for window in windows:
            logits = model(torch.from_numpy(window[None, :-1].astype(np.int64))).logits[0].numpy()
            rows.append(token_nll(logits, window[1:]))
    return np.array(rows, np.float32)


def oracle_greedy(model: Any, prompts: list[list[int]]) -> dict[str, Array]:
    """Greedy tokens of all prompts (ends of turn do not stop), the runners-up, and the leads over them."""
    import torch

    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    with torch.inference_mode():
        found = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=GREEDY_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = torch.topk(torch.stack(found.logits, 1).float(), 2)
    tokens, seconds = best.indices.numpy().astype(np.int32).transpose(2, 0, 1)
    assert np.array_equal(tokens, found.sequences[:, longest:].numpy())
    return {
        "prompt_lengths": np.array([len(prompt) for prompt in prompts], np.int32),
        "prompts": np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
        "tokens": tokens,
        "seconds": seconds,
        "leads": (best.values[:, :, 0] - best.values[:, :, 1]).numpy(),
    }


def texts(file: Path) -> tuple[Array, list[list[int]]]:
    """Ids of the text's windows, and of the prompts."""
    from atlas.tokenizer import Tokenizer

    if file.with_suffix(".ids.npz").exists():  # bench/cut_vocabulary.py
        with np.load(file.with_suffix(".ids.npz")) as known:
            ends = np.cumsum(known["lengths"])[:-1]
            return known["windows"], [part.tolist() for part in np.split(known["prompts"], ends)]
    with open_checkpoint(file) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        chat = CHAT if "Llama" in checkpoint.config["architectures"][0] else "{}\n"
    first = tokenizer.encode("", add_special_tokens=True)  # Gemma reads no text without its BOS
    ids = tokenizer.encode(TEXT.read_text(), add_special_tokens=False)
    length = min(WINDOW - len(first), len(ids) // WINDOWS)
    windows = [[*first, *ids[i * length : (i + 1) * length]] for i in range(WINDOWS)]
    prompts = [[*first, *tokenizer.encode(chat.format(text), add_special_tokens=False)] for text in GREEDY_PROMPTS]
    return np.array(windows, np.int32), prompts


def oracle(folder: Path, file: Path, cases: list[str]) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    path = folder / "oracle.npz"
    arrays: dict[str, Any] = dict(np.load(path)) if path.exists() else {}
    windows, prompts = texts(file)
    arrays["windows"] = windows
    for case in ["f32", *cases]:
        started = time.perf_counter()
        if case == "f32":
            if f"{case}.nll" in arrays:
                continue
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
        else:
            quant, source = CASES[case]
            chosen = file if source == "file" else in_bf16(file, folder / "bf16")
            runner = load(chosen, "reference", quant, programs="cuda", kv_memory_bytes=64 << 20)
            model, arrays[f"{case}.weights"] = transformers_model(runner, chosen)
            del runner
        if case == "fp8":
            round_activations(model)
        arrays[f"{case}.nll"] = oracle_nll(model, windows)
        if case == "bf16":
            arrays |= oracle_greedy(model, prompts)
        perplexity = math.exp(float(arrays[f"{case}.nll"].mean(dtype=np.float64)))
        print(f"{case}: perplexity {perplexity:.4f}, {time.perf_counter() - started:.0f} s", flush=True)
        np.savez_compressed(path, **arrays)
    return 0


# ---- device --------------------------------------------------------------------------------------


def step_logits(runner: Runner, phase: int, seqs: Array, tokens: Array, positions: Array) -> Array:
    """Logits of rows of sequences that keep KV blocks of their own."""
    block, rows, used = runner.block, len(tokens), np.unique(seqs)
    each = runner.limits.max_blocks
    block.set_phase(phase)
    block.set_symbols({"n_rows": rows, "n_seqs": len(used), "n_logits": rows})
    block.row_token[:rows], block.row_position[:rows] = tokens, positions
    block.row_seq[:rows] = np.searchsorted(used, seqs)
    block.row_kind[:rows] = 0
    block.seq_slot[: len(used)] = block.seq_rope[: len(used)] = 0
    block.block_table[: len(used)] = used[:, None] * each + np.arange(each)
    block.logit_row[:rows] = np.arange(rows)
    block.logit_temperature[:rows] = block.logit_adjust[:rows] = 0
    for name in ("logit_slot", "logit_mask", "logit_n_top", "logit_target"):
        getattr(block, name)[:rows] = -1
    runner.forward()
    return runner.logits()


def prompt_logits(runner: Runner, seq: int, ids: Array, take: Callable[[int, Array], None]) -> None:
    """Prefill a sequence; `take` gets the position of the first row and the logits of each step."""
    for begin in range(0, len(ids), runner.limits.n_logits):
        part = ids[begin : begin + runner.limits.n_logits]
        positions = begin + np.arange(len(part))
        take(begin, step_logits(runner, PHASE_PREFILL, np.full(len(part), seq), part, positions))


def score(runner: Runner, windows: Array, phase: int) -> Array:
    """Negative log-likelihood [windows, T - 1], all rows in steps of one phase."""
    count, length = windows.shape
    nll = np.zeros((count, length - 1))
    if phase == PHASE_DECODE:
        for at in range(length - 1):
            logits = step_logits(runner, phase, np.arange(count), windows[:, at], np.full(count, at))
            nll[:, at] = token_nll(logits, windows[:, at + 1])
        return nll
    for i, window in enumerate(windows):

        def take(begin: int, logits: Array, i: int = i, window: Array = window) -> None:
            end = begin + len(logits)
            nll[i, begin:end] = token_nll(logits, window[begin + 1 : end + 1])

        prompt_logits(runner, i, window[:-1], take)
    return nll


def greedy(runner: Runner, expected: dict[str, Array]) -> dict[str, Any]:
    """Tokens of all prompts together, and how far leads are from the oracle's, along the oracle's own tokens."""
    prompts = np.split(expected["prompts"], np.cumsum(expected["prompt_lengths"])[:-1])
    tokens, seconds, leads = (expected[name] for name in ("tokens", "seconds", "leads"))
    everyone, last = np.arange(len(prompts)), dict[int, Array]()
    for i, prompt in enumerate(prompts):
        prompt_logits(runner, i, prompt, lambda begin, logits, i=i: last.update({i: logits[-1]}))  # type: ignore[misc]
    logits = np.array([last[i] for i in everyone])
    found, agree = np.zeros_like(leads), np.zeros(leads.shape, bool)
    for at in range(tokens.shape[1]):
        found[:, at] = logits[everyone, tokens[:, at]] - logits[everyone, seconds[:, at]]
        agree[:, at] = logits.argmax(1) == tokens[:, at]
        if at + 1 < tokens.shape[1]:
            positions = expected["prompt_lengths"] + at
            logits = step_logits(runner, PHASE_DECODE, everyone, tokens[:, at], positions)
    error = np.abs(found - leads)[agree]
    noise = float(error.max())
    own = run.greedy(runner, [prompt.tolist() for prompt in prompts], tokens.shape[1], together=len(prompts))
    differences = []
    for i, (mine, wanted) in enumerate(zip(own, tokens.tolist(), strict=True)):
        at = next((n for n, (a, b) in enumerate(zip(mine, wanted, strict=True)) if a != b), None)
        if at is not None:  # behind it the texts go apart
            differences.append({"prompt": i, "token": at, "lead": round(float(leads[i, at]), 5)})
    return {
        "prompts": len(prompts),
        "tokens_each": tokens.shape[1],
        "noise": round(noise, 5),
        "noise_rms": round(float(np.sqrt((error**2).mean())), 5),
        "same_token_along_the_oracle": f"{int(agree.sum())} of {agree.size}",
        "first_differences": differences,
        "passed": all(each["lead"] < min(noise, LEAD_NOISE) for each in differences),
    }


def compared(nll: Array, expected: Array, original: Array) -> dict[str, Any]:
    """Perplexities, and their differences in percent with 95 % intervals of the paired values."""

    def percent(other: Array) -> list[float]:
        paired = (nll - other).ravel()
        return [round(100 * math.expm1(value), 4) for value in (float(paired.mean()), *mean_interval(paired))]

    return {
        "perplexity": round(math.exp(float(nll.mean())), 5),
        "against_oracle_percent": percent(expected),
        "largest_nll_difference": round(float(np.abs(nll - expected).max()), 4),
        "against_original_percent": percent(original),
    }


def device_case(case: str, folder: Path, file: Path, packs: Path | None, arrays: dict[str, Array]) -> dict[str, Any]:
    quant, source = CASES[case]
    path = file if source == "file" else in_bf16(file, folder / "bf16")
    pack = next(packs.glob(f"*.{quant}.atlaspack"), None) if packs else None
    started = time.perf_counter()
    runner = load(path, "cuda", quant, kernel_packs=(str(pack),) if pack else ())
    result: dict[str, Any] = {
        "kernel_set": runner.choice.name,
        "load_seconds": round(time.perf_counter() - started, 2),
        "formats": sorted(
            {runner.buffers[f"layers.0.{name}.weight"].dtype for name in ("qkv", "o", "gate_up", "down")}
        ),
        "same_weights": checksum(matrices(runner, path)) == int(arrays[f"{case}.weights"]),
        "oracle_perplexity": round(math.exp(float(arrays[f"{case}.nll"].mean(dtype=np.float64))), 5),
    }
    expected, original = (arrays[f"{name}.nll"].astype(np.float64) for name in (case, "f32"))
    for name, phase in (("prefill", PHASE_PREFILL), ("decode", PHASE_DECODE)):
        result[name] = compared(score(runner, arrays["windows"], phase), expected, original)
    off = max(abs(result[name]["against_oracle_percent"][0]) for name in ("prefill", "decode"))
    result["passed"] = bool(off <= BOUNDS[quant] and result["same_weights"])
    if case == "bf16":
        result["greedy"] = greedy(runner, arrays)
        result["passed"] = result["passed"] and result["greedy"]["passed"]
    return result


def device(folder: Path, file: Path, cases: list[str], packs: Path | None, commit: str, out: Path) -> int:
    with np.load(folder / "oracle.npz") as stored:
        arrays = dict(stored)
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    document: dict[str, Any] = {
        "what": "real weights on a GPU against transformers in float32 on the same dequantised weights",
        "model": file.name,
        "text": TEXT.name,
        "scored_tokens": arrays["windows"][:, 1:].size,
        "bounds_percent": BOUNDS,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "device": subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip(),
        "cases": {},
    }
    for case in cases:
        try:
            document["cases"][case] = device_case(case, folder, file, packs, arrays)
        except Exception as error:  # one case's failure must not hide the others' results
            document["cases"][case] = {"error": f"{type(error).__name__}: {error}", "passed": False}
        print(case, json.dumps(document["cases"][case]), flush=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(found["passed"] for found in document["cases"].values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("oracle", "device"))
    parser.add_argument("folder", type=Path, help="where the oracle's file and the bf16 checkpoint are kept")
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file, or a name of the catalogue")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--packs", type=Path, help="folder of MODEL.QUANT.atlaspack files")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, help="result file of `device`")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    file, cases = resolve_model(given.model, offline=False), given.cases.split(",")
    if given.stage == "oracle":
        return oracle(given.folder, file, cases)
    return device(given.folder, file, cases, given.packs, given.commit, given.out or given.folder / "device.json")


if __name__ == "__main__":
    sys.exit(main())
