"""SmolLM2-135M on the CPU beside llama.cpp and PyTorch, on the same cores, from the same bytes.

    python -m bench.cpu_smollm2 --llama-python PYTHON --torch-python PYTHON --out bench/results/cpu_smollm2.json

PYTHONs are interpreters of environments with llama-cpp-python, and with torch and transformers. Cases: the catalogue's
4-bit GGUF, and the same weights as Q8_0 written with `gguf.quants`. Measured: a decode loop of one sequence (llama.cpp:
bare llama_decode; Atlas: whole engine steps, sampling included), a prompt of 512 tokens, and a step of eight
sequences. Rounds of all contenders alternate; the best of each is compared, since everything else that runs on a
machine only ever makes it slower. A roofline line per case gives bytes, operations, and the shares of the memory
bandwidth and of the int8 multiply rate that `atlas.bench` measures in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from atlas import __version__
from atlas.bench import roofline
from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.weights import open_checkpoint
from atlas.weights.fetch import resolve_model

TOKENS, PROMPT, SEQUENCES, REPEATS = 128, 512, 8, 5
PEERS = Path(__file__).parent / "peers"


def write_q8_0(source: Path, target: Path) -> None:
    """The same model with every 4-bit matrix dequantised and stored as Q8_0."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        if tensor.tensor_type in (gguf.GGMLQuantizationType.F32, q8):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quantize(values, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Atlas:
    """One model in an engine of its own."""

    def __init__(self, path: Path, threads: int, quant: str | None) -> None:
        with open_checkpoint(path) as checkpoint:
            started = time.perf_counter()
            options = RunnerOptions(
                backend="cpu", quant=quant, threads=threads, max_context=1024, max_seqs=SEQUENCES, max_rows=PROMPT
            )
            self.runner = Runner.load(checkpoint, options)
            self.load_seconds = time.perf_counter() - started
        self.engine = Engine(self.runner)
        self.rng = np.random.default_rng(0)
        self.serial = 0

    def _add(self, prompt: int, tokens: int) -> None:
        self.serial += 1
        ids = [int(t) for t in self.rng.integers(5, self.runner.config.shape.vocab_size, prompt)]
        self.engine.add(str(self.serial), ids, SamplingParams(max_tokens=tokens))

    def decode(self, sequences: int, tokens: int) -> float:
        """Seconds of `tokens` decode steps of `sequences` sequences."""
        for _ in range(sequences):
            self._add(32, tokens + 1)
        self.engine.step()
        begin = time.perf_counter()
        while self.engine.busy:
            self.engine.step()
        return time.perf_counter() - begin

    def prefill(self) -> float:
        """Seconds of a prompt of PROMPT tokens, its first token sampled."""
        self._add(PROMPT, 1)
        begin = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - begin


def peer(python: str, script: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run([python, str(PEERS / script), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def rate(tokens: int, seconds: list[float]) -> dict[str, Any]:
    """Tokens per second of the best repeat, and all repeats' seconds."""
    return {"tokens_per_s": round(tokens / min(seconds), 1), "seconds": [round(s, 4) for s in seconds]}


def measure(path: Path, threads: int, rounds: int, llama: str | None, quant: str | None) -> dict[str, Any]:
    """One file: Atlas and llama.cpp in alternation."""
    ours: dict[str, list[float]] = {"decode": [], "decode_8": [], "prefill": []}
    theirs: dict[str, list[float]] = {"decode": [], "decode_8": [], "prefill": []}
    info: dict[str, Any] = {}
    best: dict[str, float] = {}
    steps = TOKENS // 4
    for _ in range(rounds):
        atlas = Atlas(path, threads, quant)
        for _ in range(REPEATS):
            ours["decode"].append(atlas.decode(1, TOKENS))
            ours["decode_8"].append(atlas.decode(SEQUENCES, steps))
            ours["prefill"].append(atlas.prefill())
        # Taken in every round: the machine's other tenants change what it can do.
        rates = roofline.measured_rates(atlas.runner, threads)
        assert rates is not None
        for name, rate_ in rates.items():
            best[name] = max(best.get(name, 0.0), rate_)
        costs = {
            "decode": (roofline.decode_cost(atlas.engine, 1, 32 + TOKENS // 2), 1),
            "decode_8": (roofline.decode_cost(atlas.engine, SEQUENCES, 32 + steps // 2), SEQUENCES),
            "prefill": (roofline.prefill_cost(atlas.engine, PROMPT), PROMPT),
        }
        runner = atlas.runner
        plan = runner.plan
        info = {
            "quant": atlas.runner.choice.quant,
            "weight_bytes": plan.regions["weights"][1] - plan.regions["weights"][0],
            "load_seconds": round(atlas.load_seconds, 2),
        }
        del atlas
        if llama:
            result = peer(llama, "llama_decode.py", str(path), str(threads))
            info["llama_cpp_python"] = result["version"]
            for name, seconds in theirs.items():
                seconds += result[name]
    counts = {"decode": TOKENS, "decode_8": steps * SEQUENCES, "prefill": PROMPT}
    case: dict[str, Any] = {**info, "atlas": {n: rate(counts[n], s) for n, s in ours.items()}}
    for name, (step, tokens) in costs.items():
        found = roofline.line(runner, best, step, tokens, counts[name] / min(ours[name]))
        case["atlas"][name]["roofline"] = found
        print(f"{path.name} {name}: {roofline.sentence(found)}", flush=True)
    one, eight = min(ours["decode"]) / TOKENS, min(ours["decode_8"]) / counts["decode_8"]
    case["eight_sequences_gain_per_token"] = round(one / eight, 2)
    if llama:
        case["llama_cpp"] = {n: rate(counts[n], s) for n, s in theirs.items()}
        case["over_llama_cpp"] = {n: round(min(theirs[n]) / min(ours[n]), 2) for n in ours}
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the 4-bit GGUF (default: from the catalogue)")
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python")
    parser.add_argument("--torch-python", help="interpreter with torch and transformers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    source = given.model or resolve_model(None, offline=False)
    result: dict[str, Any] = {
        "what": "SmolLM2-135M on the CPU: tokens/s, best of all repeats",
        "commit": given.commit,
        "machine": {"cpu": cpu_name(), "cores": given.threads, "python": platform.python_version()},
        "atlas": __version__,
    }
    with tempfile.TemporaryDirectory() as folder:
        q8 = Path(folder) / "SmolLM2-135M-Instruct.Q8_0.gguf"
        write_q8_0(source, q8)
        result["4bit"] = measure(source, given.threads, given.rounds, given.llama_python, None)
        result["8bit"] = measure(q8, given.threads, given.rounds, given.llama_python, None)
        result["bf16"] = measure(source, given.threads, 1, None, "bf16")
        if given.torch_python:
            config = Path(folder) / "config.json"
            with open_checkpoint(source) as checkpoint:
                config.write_text(json.dumps(checkpoint.config))
            found = [
                peer(given.torch_python, "torch_bf16.py", str(config), str(given.threads)) for _ in range(given.rounds)
            ]
            seconds = [s for r in found for s in r["prefill"]]
            result["torch_bf16"] = {"version": found[0]["version"], "prefill": rate(PROMPT, seconds)}
            for name in ("4bit", "8bit", "bf16"):
                ours = result[name]["atlas"]["prefill"]["tokens_per_s"]
                result[name]["prefill_over_torch"] = round(ours / result["torch_bf16"]["prefill"]["tokens_per_s"], 2)
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
