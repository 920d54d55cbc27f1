"""Dense models on an H200: checks first, then the figures that README and docs quote.

    python -m bench.h200_dense --models llama-3-8b --quants bf16,fp8 --commit $(git rev-parse HEAD) --out FILE.json

For each model and quant: a checkpoint with random weights in memory (/dev/shm), then
1. the same shape with few layers: logits of a prompt and of generated tokens against PyTorch in float32 on the same
   dequantised weights, a row's bits in batches of 1 to 128 rows, and greedy tokens alone and in a batch;
2. decode: C requests of 128 random tokens in, 1,024 out, greedy, in this process: C = 1, 8, 32, 128; aggregate tokens/s
   from the first request's start to the last one's end, the median step, what the host took of it, and what steps far
   above the median lost;
3. prefill: 1 x 8,192 and 16 x 2,048 tokens, best of 3;
4. seconds of a decode step by kernel, and how much of the read ceiling each reaches.

Needs an installed Atlas with the targets, and PyTorch. Figures stand beside the peer's (vLLM 0.23 on the same kind of
machine) and the bandwidth limit, which follows from a step's bytes for models without a peer. Exits 1 when a check
fails, also when all figures are good.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams
from atlas.models import family_of, fusion
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.runtime.step import PHASE_DECODE
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from atlas.weights import open_checkpoint
from bench import random_checkpoint
from bench.compare_steps import fill, logits_of, replay_ms
from bench.predict_decode import kv_bytes, weight_bytes
from bench.step_times import StepTimes

READ_CEILING = 4.65e12
"""Bytes per second that plain reads reach on this card."""
CONCURRENCY = (1, 8, 32, 128)
IN, OUT = 128, 1024
MEAN_CONTEXT = IN + OUT // 2
"""Tokens of a sequence, in the mean over its steps."""
PREFILLS = ((1, 8192), (16, 2048))
CONTEXT = 8448
"""Tokens of a sequence that the model is loaded for; the peer was."""
CHECKED_LAYERS = 4
REL_L2 = {"bf16": 1.6e-2, "int4": 1.6e-2, "nvfp4": 1.6e-2, "fp8": 8e-2}
"""Of logits against float32 on the same weights; fp8 rounds activations to 3 bits of mantissa as well."""

PEER: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {
    ("llama-3-8b", "bf16"): {
        "vllm": (201, 1538, 5310, 13720, 37700, 42700),
        "limit": (309, 2400, 8300, 23000),
        "must": (255, 1900, 6300, 16000, 37700, 42700),
        "goal": (285, 2150, 7200, 18500, 43000, 49000),
    },
    ("llama-3-8b", "fp8"): {
        "vllm": (286, 2161, 6445, 16890, 57200, 65600),
        "limit": (573, 4280, 13900, 31700),
        "must": (420, 3000, 8500, 20500, 57200, 65600),
        "goal": (500, 3700, 10800, 25000, 66000, 75000),
    },
    ("llama-3.2-1b", "bf16"): {
        "vllm": (694, 4900, 16350, 40000, 197000, 262000),
        "limit": (1865, 14100, 47300, 115000),
        "must": (1150, 8000, 22000, 48000, 200000, 265000),
        "goal": (1450, 10500, 29000, 62000, 240000, 300000),
    },
}
for _quant in ("nvfp4", "int4"):
    PEER["llama-3-8b", _quant] = {
        "limit": (919, 6590, 19400, 37900),
        "must": (560, 3400, 8500, 16000, 30000, 34000),
        "goal": (720, 4800, 11500, 20000, 37000, 42000),
    }
"""Columns: tokens/s at C = 1, 8, 32, 128, then prefill tokens/s of 1 x 8,192 and 16 x 2,048."""

SHARES: dict[tuple[str, str], dict[str, float]] = {
    ("qwen3-8b", "bf16"): {"must": 0.82},
    ("qwen3-8b", "fp8"): {"must": 0.68},
    ("qwen3-0.6b", "bf16"): {"must": 0.45, "goal": 0.60},
}
"""Models without a peer's figures: shares of the bandwidth limit at C = 1. At the other C the must is llama-3-8b's
share of its limit, in the same quant."""


def facts(model: str) -> dict[str, Any]:
    import atlas

    roots = (Path(__file__).resolve().parents[1], Path(atlas.__file__).parent)
    path = next(p for root in roots if (p := root / "kernels" / "models" / f"{model}.json").exists())
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def expected(model: str, quant: str) -> dict[str, tuple[float, ...]]:
    """PEER's rows of the model; of one in SHARES the limit by the bytes of a step, and what follows from it."""
    shares = SHARES.get((model, quant))
    if shares is None:
        return PEER.get((model, quant), {})
    config = facts(model)
    family = family_of(config)
    programs = fusion.record(family, family.configure(config, Shard()), recipe(quant, "cuda"), "cuda")
    weights, kv = weight_bytes(programs), kv_bytes(programs, MEAN_CONTEXT)
    limit = tuple(round(count * READ_CEILING / (weights + count * kv), 1) for count in CONCURRENCY)
    first = {name: round(share * limit[0], 1) for name, share in shares.items()}
    llama = PEER["llama-3-8b", quant]
    others = (round(a / b * c, 1) for a, b, c in zip(llama["must"][1:4], llama["limit"][1:], limit[1:], strict=True))
    return {"limit": limit, **{name: (value,) for name, value in first.items()}, "must": (first["must"], *others)}


PACKS: dict[tuple[str, str], str] = {}
"""Kernel packs to use instead of what is installed, by model and quant."""


def load(model: str, folder: Path, quant: str, **options: Any) -> Runner:
    packs = (PACKS[model, quant],) if (model, quant) in PACKS else ()
    with open_checkpoint(folder) as checkpoint:
        return Runner.load(checkpoint, RunnerOptions(backend="cuda", quant=quant, kernel_packs=packs, **options))


def generate(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, list[float]]:
    """Greedy tokens of all prompts together; seconds from the first request on, to the end and to every output."""
    results: list[list[int]] = [[] for _ in prompts]
    times = []
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, SamplingParams(max_tokens=tokens, temperature=0.0))
    while engine.busy:
        outputs = engine.step()
        if outputs:
            times.append(time.perf_counter() - started)
        for output in outputs:
            assert output.error is None, output.error
            results[int(output.request_id)] += output.token_ids
    return results, time.perf_counter() - started, times


def relative_l2(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(np.float64(b)))


def step_logits(runner: Runner, ids: list[int], prompt: int) -> Any:
    """Logits of one sequence: the first `prompt` tokens in prefill steps, the rest one by one in decode steps."""
    block, parts = runner.block, []
    most = runner.limits.n_logits
    spans = [(b, min(prompt, b + most)) for b in range(0, prompt, most)]
    spans += [(i, i + 1) for i in range(prompt, len(ids))]
    for begin, end in spans:
        rows = end - begin
        block.set_phase(PHASE_DECODE if begin >= prompt else 0)
        block.set_symbols({"n_rows": rows, "n_seqs": 1, "n_logits": rows})
        block.row_token[:rows] = ids[begin:end]
        block.row_position[:rows] = np.arange(begin, end)
        block.row_seq[:rows] = block.seq_slot[:1] = block.seq_rope[0] = 0
        block.block_table[0, : -(-len(ids) // 16)] = np.arange(-(-len(ids) // 16))[::-1]
        block.logit_row[:rows] = np.arange(rows)
        block.logit_slot[:rows] = block.logit_mask[:rows] = -1
        block.logit_temperature[:rows] = 0.0
        runner.forward()
        parts.append(runner.logits())
    return np.concatenate(parts)


WEIGHT_LOSS = {"bf16": 0.0, "fp8": 0.04, "nvfp4": 0.13, "int4": 0.13}
"""Relative L2 that a format may cost normally distributed weights."""


def weight_loss(runner: Runner, folder: Path) -> dict[str, float]:
    """Relative L2 between matrices that the device holds and those of the checkpoint, in the last layer."""
    layer = runner.config.n_layers - 1
    parts = {
        "qkv": [f"self_attn.{name}_proj" for name in "qkv"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    found = {}
    with open_checkpoint(folder) as checkpoint:
        for name, tensors in parts.items():
            given = np.concatenate([checkpoint.read(f"model.layers.{layer}.{t}.weight") for t in tensors])
            found[name] = round(relative_l2(runner.read(f"layers.{layer}.{name}.weight"), given.astype(np.float32)), 5)
    return found


def check(model: str, quant: str, folder: Path) -> dict[str, Any]:
    """Few layers of the shape against PyTorch, and a batch against each request alone."""
    from bench import torch_decoder

    config = facts(model)
    small = random_checkpoint.write(folder / "few", config, CHECKED_LAYERS, seed=1)
    runner = load(model, small, quant, max_context=512, max_seqs=128, max_rows=512, max_logits=128)
    config = json.loads((small / "config.json").read_text())
    rng = np.random.default_rng()
    ids = rng.integers(0, config["vocab_size"], 213).tolist()
    expected = torch_decoder.logits(runner, config, ids)
    found = step_logits(runner, ids, 200)
    _, same_bits = logits_of(runner, config["vocab_size"])
    prompts = [rng.integers(0, config["vocab_size"], n).tolist() for n in (1, 5, 64, 127, 128, 200, 33, 300)]
    engine = Engine(runner)
    together, _, _ = generate(engine, prompts, 24)
    alone = [generate(engine, [prompt], 24)[0][0] for prompt in prompts]
    result = {
        "prefill_relative_l2": round(relative_l2(found[:200], expected[:200]), 5),
        "decode_relative_l2": round(relative_l2(found[200:], expected[200:]), 5),
        "same_bits_in_every_batch": same_bits,
        "batch_equals_alone": together == alone,
        "weight_loss": weight_loss(runner, small),
    }
    result["passed"] = bool(
        max(result["prefill_relative_l2"], result["decode_relative_l2"]) <= REL_L2[quant]
        and max(result["weight_loss"].values()) <= WEIGHT_LOSS[quant]
        and same_bits
        and together == alone
    )
    shutil.rmtree(small)
    return result


def by_kernel(runner: Runner, count: int, context: int = MEAN_CONTEXT) -> dict[str, list[float]]:
    """Microseconds of a decode step of `count` sequences at `context` tokens: op and matrix -> [calls, us of all
    alone, us by which they make the step longer]. Alone each has its own start (1.3 us); the last sums to the step."""
    fill(runner, np.full(count, context))
    launches = (*runner.forward_program.launches, *runner.sample_program.launches)
    runs = np.median(np.array([runner.run_timed() for _ in range(5)]), axis=0)
    found: dict[str, list[float]] = {}
    for launch, alone, added in zip(launches, runs.tolist(), runner.run_growing(3), strict=True):
        if not launch.is_made(PHASE_DECODE):
            continue
        name = f"{launch.key.op} {launch.name.rpartition('.')[2]}"
        entry = found.setdefault(name, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] = round(entry[1] + alone * 1e6, 2)
        entry[2] = round(entry[2] + added * 1e6, 2)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def first_token(model: str, folder: Path, quant: str) -> dict[str, Any]:
    """Seconds from process start to the first token, the checkpoint being in memory."""
    packs = [PACKS[model, quant]] if (model, quant) in PACKS else []
    # As pip leaves an installation: compiled. A source tree is, once something has imported it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    modules = "bench.h200_dense, bench.first_token, atlas.weights.safetensors"
    subprocess.run([sys.executable, "-c", f"import {modules}"], env=environment, check=True)
    command = [sys.executable, "-m", "bench.first_token", str(folder), quant, str(time.time()), *packs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def timings(model: str, folder: Path, quant: str, kernels: bool = True) -> dict[str, Any]:
    started = time.perf_counter()
    runner = load(model, folder, quant, max_context=CONTEXT, max_seqs=128, kv_memory_bytes=40 << 30)
    result: dict[str, Any] = {
        "kernel_set": runner.choice.name,
        "load_seconds": round(time.perf_counter() - started, 2),
        "ledger": {name: round(seconds, 3) for name, seconds in runner.ledger},
        "memory": dict(runner.memory),
        "decode": {},
        "prefill": {},
    }
    engine, rng, vocab = Engine(runner), np.random.default_rng(), runner.config.shape.vocab_size

    def prompts(count: int, length: int) -> list[list[int]]:
        return [rng.integers(0, vocab, length).tolist() for _ in range(count)]

    known = expected(model, quant)
    generate(engine, prompts(2, IN), 8)
    for column, count in enumerate(CONCURRENCY):
        steps, given = StepTimes(), prompts(count, IN)
        with steps.watch(engine):
            tokens, seconds, times = generate(engine, given, OUT)
        assert all(len(each) == OUT for each in tokens)
        result["decode"][count] = {
            "tokens_per_second": round(count * OUT / seconds, 1),
            "step_ms": round(float(statistics.median(np.diff(times[len(times) // 4 :]))) * 1e3, 4),
            "first_token_ms": round(times[0] * 1e3, 2),
            "replay_ms": round(replay_ms(runner, np.full(count, MEAN_CONTEXT), steps=100), 4),
            **steps.summary(count * (OUT - 1)),
            **{name: row[column] for name, row in known.items() if len(row) > column},
        }
        print(model, quant, f"C={count}", result["decode"][count], flush=True)
    for column, (count, length) in enumerate(PREFILLS, len(CONCURRENCY)):
        best = min(generate(engine, prompts(count, length), 1)[1] for _ in range(3))
        result["prefill"][f"{count}x{length}"] = {
            "tokens_per_second": round(count * length / best),
            "ms": round(best * 1e3, 1),
            **{name: row[column] for name, row in known.items() if len(row) > column},
        }
        print(model, quant, f"prefill {count}x{length}", result["prefill"][f"{count}x{length}"], flush=True)
    for count in CONCURRENCY if kernels else ():
        result["decode"][count]["by_kernel_us"] = by_kernel(runner, count)
        print(model, quant, f"C={count}", result["decode"][count]["by_kernel_us"], flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-3-8b")
    parser.add_argument("--quants", default="bf16")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/atlas_dense"))
    parser.add_argument("--packs", type=Path, help="folder of MODEL.QUANT.atlaspack files")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--no-start", action="store_true", help="leave out the start of a process")
    parser.add_argument("--no-kernels", action="store_true", help="leave out the times by kernel")
    given = parser.parse_args()
    for path in given.packs.glob("*.atlaspack") if given.packs else ():
        model, quant, _ = path.name.rsplit(".", 2)
        PACKS[model, quant] = str(path)
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    result: dict[str, Any] = {
        "what": "dense models on an H200",
        "commit": given.commit,
        "date": time.strftime("%Y-%m-%d"),
        "device": subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip(),
        "python": sys.version.split()[0],
        "cases": {},
    }
    passed = True
    for model in given.models.split(","):
        whole = given.folder / model
        if not given.no_timing:
            random_checkpoint.write(whole, facts(model), max_context=CONTEXT)
        for quant in given.quants.split(","):
            case: dict[str, Any] = {}
            try:
                if not given.no_check:
                    case["check"] = check(model, quant, given.folder)
                    print(model, quant, case["check"], flush=True)
                    passed = passed and case["check"]["passed"]
                if not given.no_timing:
                    if not given.no_start:
                        case["start"] = first_token(model, whole, quant)
                        print(model, quant, "start", case["start"], flush=True)
                    case |= timings(model, whole, quant, not given.no_kernels)
            except Exception as error:  # one case's failure must not hide the others' figures
                case["error"] = f"{type(error).__name__}: {error}"
                passed = False
                print(model, quant, case["error"], flush=True)
            result["cases"][f"{model}/{quant}"] = case
            given.out.write_text(json.dumps(result, indent=1))
        shutil.rmtree(whole, ignore_errors=True)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
