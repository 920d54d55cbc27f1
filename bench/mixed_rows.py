"""Steps in which rows want more than a greedy token: a bias, penalties, log-probabilities, a mask, a grammar.

    python -m bench.mixed_rows --cut gemma-3-270m:128256 --tokenizer FILE             a tokenizer for the model below
    python -m bench.mixed_rows FOLDER --model llama-3.2-1b --tokenizer FILE --out FILE.json     on the device

On a GPU such a step replays two graphs, between which masks arrive, and a step of greedy rows one that leaves no
logits. FOLDER gets random weights of the model's shape, unless it has a model. Then

1. steps whose rows ask for all of this at random: tokens, counts and log-probabilities against NumPy on the logits
   that the device left, and greedy rows against a step that is greedy as a whole;
2. steps in flight in which a mask leaves one token to each row: every row must get its own step's;
3. requests of every kind, first each alone and then together with others that come and go: tokens and
   log-probabilities must be the same, a forbidden token must not occur, and a grammar's text must be one of it;
4. milliseconds of a decode step by what rows ask for: replayed, where one step waits behind another, and in the
   engine, whose host makes masks and reads results.

Exits 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atlas.engine.engine import Engine
from atlas.engine.grammar import Compiler, tokenizer_of
from atlas.engine.messages import SamplingParams
from atlas.engine.sampling import Grammar
from atlas.ops import adjust_logits, logprobs
from atlas.ops.adjust_logits import ADJUST_BIAS, ADJUST_MASK, ADJUST_PENALTIES, COUNT_PROMPT
from atlas.runtime.flight import InFlight
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL
from atlas.weights import open_checkpoint
from bench import random_checkpoint
from bench.grammar_masks import CITY, document_of
from bench.h200_dense import facts
from bench.step_times import StepTimes

Array = np.ndarray[Any, np.dtype[Any]]

CITIES = Grammar("json_schema", json.dumps({"type": "array", "items": CITY, "minItems": 100}))
TEXTS = Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 100}))
"""Texts that no request here reaches the end of. In CITIES strings have 30 characters at most; near their ends a mask
takes longest."""
CHECKED = (1, 7, 8, 9, 32, 100, 128)
"""Rows of checked steps."""
PROMPT, CONTEXT = 128, 512
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {7: 2.0, 11: -3.0}},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "logprobs": {"logprobs": 5},
    "grammar": {"grammar": CITIES},
    "texts": {"grammar": TEXTS},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
}


def load(folder: Path, given: argparse.Namespace) -> Runner:
    packs = (str(given.pack),) if given.pack else ()
    sizes = {"max_context": CONTEXT, "max_seqs": given.max_seqs, "max_rows": 2048, "kv_memory_bytes": given.kv << 20}
    if given.backend != "cuda":
        sizes["max_rows"] = 64
    with open_checkpoint(folder) as checkpoint:
        return Runner.load(
            checkpoint, RunnerOptions(backend=given.backend, quant=given.quant, kernel_packs=packs, **sizes)
        )


# ---- one step, by hand ---------------------------------------------------------------------------


def describe(runner: Runner, tokens: Array, wishes: Mapping[str, Array]) -> None:
    """A step of one row for each of the sequences, which `tokens` begin. wishes: of fields that are not greedy's."""
    block, n = runner.block, len(tokens)
    block.set_phase(PHASE_DECODE if runner.decode_rows else PHASE_PREFILL)
    block.set_symbols({"n_rows": n, "n_seqs": n, "n_logits": n})
    block.row_token[:n], block.row_position[:n], block.row_kind[:n] = tokens, 0, 0
    for name in ("row_seq", "logit_row", "logit_slot", "seq_slot"):
        getattr(block, name)[:n] = np.arange(n)
    block.seq_rope[:n] = 0
    block.block_table[:n, 0] = np.arange(n)
    block.logit_position[:n], block.logit_temperature[:n], block.logit_adjust[:n] = 1, 0, 0
    for name in ("logit_mask", "logit_n_top", "logit_target"):
        getattr(block, name)[:n] = -1
    for name, values in wishes.items():
        block.fields[name][:n] = values


def run_step(runner: Runner, tokens: Array, wishes: Mapping[str, Array], masks: Array) -> tuple[Any, Any, Array]:
    """Tokens, log-probabilities and logits of one step that comes in halves."""
    describe(runner, tokens, wishes)
    runner.begin()
    logits = runner.logits()
    found, reported = runner.collect(runner.end(masks, logprobs=bool((wishes["logit_n_top"] >= 0).any())))
    return found.copy(), reported, logits


def check_step(runner: Runner, rows: int, rng: np.random.Generator) -> list[str]:
    """What is wrong with a step whose rows want something at random."""
    vocab = runner.config.shape.vocab_size
    tokens = rng.integers(0, vocab, rows)
    describe(runner, tokens, {})
    greedy = runner.collect(runner.submit())[0].copy()
    adjust = rng.choice([0, 0, 0, 1, 2, 4, 3, 6, 7], rows).astype(np.int32)
    masked = np.flatnonzero(adjust & ADJUST_MASK)
    mask_index = np.full(rows, -1, np.int32)
    mask_index[masked] = rng.permutation(len(masked))
    share = rng.choice([1e-4, 0.5, 0.999], (len(masked), 1))
    allowed = rng.random((len(masked), -(-vocab // 32) * 32)) < share
    allowed[:, :vocab][np.arange(len(masked)), rng.integers(0, vocab, len(masked))] = True
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    wishes = {
        "logit_adjust": adjust,
        "logit_mask": mask_index,
        "logit_n_top": rng.choice([-1, -1, 0, 5, 20], rows).astype(np.int32),
        "logit_repetition": rng.uniform(0.7, 1.6, rows).astype(np.float32),
        "logit_frequency": rng.uniform(-0.5, 0.5, rows).astype(np.float32),
        "logit_presence": rng.uniform(-0.5, 0.5, rows).astype(np.float32),
    }
    bias = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
    counts = np.where(rng.random((rows, vocab)) < 0.3, rng.integers(0, 4, (rows, vocab)), 0).astype(np.uint32)
    counts[rng.random((rows, vocab)) < 0.1] |= np.uint32(COUNT_PROMPT)
    for slot in range(rows):
        runner.write_slot("logit_bias", slot, bias[slot])
        runner.write_slot("token_count", slot, counts[slot].view(np.int32))
    found, reported, logits = run_step(runner, tokens, wishes, masks)

    arrays: dict[str, Any] = {name.removeprefix("logit_"): values for name, values in wishes.items()}
    arrays |= {"logits": logits, "slot": np.arange(rows), "bias": bias, "token_count": counts.view(np.int32)}
    arrays |= {"mask": masks, "mask_index": mask_index, "adjusted": np.zeros((rows, vocab), np.float32)}
    adjust_logits.reference(arrays, {"logits": rows, "slots": rows}, {"vocab": vocab})
    wrong = []
    for i in np.flatnonzero(adjust):
        row = arrays["adjusted"][i]
        lead = float(row.max()) - float(row[found[i]])
        if not lead <= 1e-5 * max(1.0, float(row.max())):  # a product and a sum may be rounded once
            wrong.append(f"row {i} of {rows}, adjust {adjust[i]}: token {found[i]} stands {lead} below the largest")
    plain = adjust == 0
    if not (found[plain] == greedy[plain]).all():
        wrong.append(f"{rows} rows: greedy rows have other tokens beside others")
    expected = counts.copy()
    penalised = np.flatnonzero(adjust & ADJUST_PENALTIES)
    expected[penalised, found[penalised]] += 1
    if not np.array_equal(runner.read("token_count")[:rows].view(np.uint32), expected):
        wrong.append(f"{rows} rows: tokens are counted wrongly")
    asked = np.flatnonzero(wishes["logit_n_top"] >= 0)
    if len(asked):
        arrays |= {"token": found, "target": np.full(rows, -1), "logprob": np.zeros(rows), "rank": np.zeros(rows, int)}
        arrays |= {"top_token": np.zeros((rows, 20), int), "top_logprob": np.zeros((rows, 20))}
        logprobs.reference(arrays, {"logits": rows}, {"vocab": vocab})
        for i in asked:
            top = slice(0, max(0, int(wishes["logit_n_top"][i])))
            same = reported.rank[i] == arrays["rank"][i]
            same &= np.array_equal(reported.top_token[i, top], arrays["top_token"][i, top])
            error = abs(reported.logprob[i] - arrays["logprob"][i])
            error = max([error, *abs(reported.top_logprob[i, top] - arrays["top_logprob"][i, top])])
            if not (same and error <= 1e-5 * max(1.0, abs(arrays["logprob"][i]))):
                wrong.append(f"row {i} of {rows}: log-probabilities are off by {error}, ranks equal: {bool(same)}")
    return wrong


def check_order(runner: Runner, rows: int, steps: int, rng: np.random.Generator, halves: bool) -> int:
    """Steps in flight, each with masks that leave one token to a row. How many rows got another."""
    vocab = runner.config.shape.vocab_size
    wanted = rng.integers(0, vocab, (steps, rows))
    flying: list[tuple[InFlight, int]] = []
    wrong = 0

    def collect() -> int:
        in_flight, step = flying.pop(0)
        return int((runner.collect(in_flight)[0] != wanted[step]).sum())

    for step in range(steps):
        masks = np.zeros((rows, -(-vocab // 32)), np.uint32)
        masks[np.arange(rows), wanted[step] // 32] = np.uint32(1) << (wanted[step] % 32).astype(np.uint32)
        order = rng.permutation(rows).astype(np.int32)
        wishes = {"logit_adjust": np.full(rows, ADJUST_MASK), "logit_mask": order}
        describe(runner, rng.integers(0, vocab, rows), wishes)
        if halves:
            runner.begin()
            while flying:
                wrong += collect()
            flying.append((runner.end(masks[np.argsort(order)]), step))
        else:
            flying.append((runner.submit(masks[np.argsort(order)]), step))
            while len(flying) > runner.ahead:
                wrong += collect()
    while flying:
        wrong += collect()
    return wrong


# ---- requests ------------------------------------------------------------------------------------

Request = tuple[list[int], dict[str, Any]]


def generate(engine: Engine, requests: list[Request], at_first: int = 1 << 30) -> list[tuple[Any, ...]]:
    """Tokens, log-probabilities and reason of each request; those after the first so many join one a step."""
    texts: list[list[int]] = [[] for _ in requests]
    reports: list[list[Any]] = [[] for _ in requests]
    reasons: list[str] = [""] * len(requests)
    added = 0
    while added < len(requests) or engine.busy:
        now = range(added, min(len(requests), added + 1 if added else at_first))
        for i in now:
            engine.add(str(i), requests[i][0], SamplingParams(**requests[i][1]))
        added += len(now)
        for output in engine.step():
            i = int(output.request_id)
            texts[i] += output.token_ids
            reports[i] += output.logprobs
            reasons[i] = output.error or output.finish_reason or reasons[i]
    return list(zip(texts, reports, reasons, strict=True))


def check_requests(engine: Engine, compiler: Compiler, each: int, most: int, tokens: int) -> tuple[list[str], int]:
    """What is wrong with requests of every kind among others; how many were compared."""
    rng, vocab = np.random.default_rng(), engine.runner.config.shape.vocab_size
    requests: list[Request] = []
    kinds = ("greedy", *OPTIONS, "masked", "everything")
    wrong = []
    for seed in range(each):
        for kind in kinds:
            prompt = rng.integers(0, vocab, rng.integers(1, 60)).tolist()
            length = int(rng.integers(tokens // 2, tokens))
            options: dict[str, Any] = {"max_tokens": length, "seed": seed, **OPTIONS.get(kind, {})}
            if kind in ("bias", "masked", "everything"):
                own = generate(engine, [(prompt, {"max_tokens": length})])[0][0]
                if kind == "masked":
                    options |= {"min_tokens": length, "stop_token_ids": (own[0], own[1])}
                else:
                    options |= {"logit_bias": {own[0]: -100.0, own[1]: -100.0}}
            if kind == "everything":
                options |= {**OPTIONS["sampled"], **OPTIONS["penalties"], **OPTIONS["logprobs"]}
                options |= {"min_p": 0.01, "min_tokens": length, "stop_token_ids": (5,)}
            requests.append((prompt, options))
    alone = [generate(engine, [request])[0] for request in requests]
    for (_, options), (text, reports, reason) in zip(requests, alone, strict=True):
        if reason not in ("length", "stop"):
            wrong.append(f"{options}: {reason}")
        never = {*options.get("stop_token_ids", ()), *(t for t, b in options.get("logit_bias", {}).items() if b < -99)}
        if never & {*text}:
            wrong.append(f"a forbidden token was taken: {options}")
        if len(reports) != (len(text) if "logprobs" in options else 0):
            wrong.append(f"{len(reports)} log-probabilities of {len(text)} tokens")
        if (grammar := options.get("grammar")) and compiler.matcher(grammar).try_consume_tokens(text) != len(text):
            wrong.append(f"no text of the grammar: {text}")
    compared = len(requests)
    for count, at_first in ((8, 8), (32, 16), (most, most), (most, most // 2)):
        picked = [i % len(requests) for i in range(count)]
        random.shuffle(picked)
        together = generate(engine, [requests[i] for i in picked], at_first)
        compared += count
        for i, found in zip(picked, together, strict=True):
            if found != alone[i]:
                first = next((n for n, (a, b) in enumerate(zip(found[0], alone[i][0], strict=False)) if a != b), -1)
                wrong.append(f"among {count}: {requests[i][1]} differs from alone, first in token {first}")
    return wrong, compared


# ---- what a step costs ---------------------------------------------------------------------------


def replayed(runner: Runner, rows: int, kind: str, steps: int = 40) -> float:
    """Milliseconds of a step, one always waiting behind another, by what its rows want."""
    vocab, rng = runner.config.shape.vocab_size, np.random.default_rng(1)
    tokens = rng.integers(0, vocab, rows)
    adjust = {"bias": ADJUST_BIAS, "penalties": ADJUST_PENALTIES, "masked": ADJUST_MASK}.get(kind.split()[-1], 0)
    some = np.arange(rows) < (1 if kind.startswith("one") else rows)
    wishes = {
        "logit_adjust": np.where(some, adjust, 0),
        "logit_mask": np.where(some & (adjust == ADJUST_MASK), np.arange(rows), -1),
        "logit_n_top": np.where(some & (kind.split()[-1] == "logprobs"), 5, -1),
        "logit_repetition": np.full(rows, 1.2),
    }
    masks = np.full((int(some.sum()) if adjust == ADJUST_MASK else 0, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    flying: list[InFlight] = []
    started = 0.0
    for step in range(steps + 8):
        if step == 8:
            started = time.perf_counter()
        if step <= runner.ahead:
            describe(runner, tokens, wishes)
        flying.append(runner.submit(masks, logprobs="logprobs" in kind))
        if len(flying) > runner.ahead:
            runner.collect(flying.pop(0))
    for one in flying:
        runner.collect(one)
    return (time.perf_counter() - started) / steps * 1e3


def costs(engine: Engine, counts: list[int], tokens: int, rounds: int, only: list[str]) -> dict[str, Any]:
    """By rows and by what they ask for: replayed ms, the engine's median ms, and where its host spent a step."""
    runner, rng = engine.runner, np.random.default_rng()
    vocab, found = runner.config.shape.vocab_size, {}
    masked = {"min_tokens": tokens, "stop_token_ids": (3, 5)}
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "greedy": lambda i: {},
        "one masked": lambda i: {} if i else masked,
        "masked": lambda i: masked,
        "one logprobs": lambda i: {} if i else OPTIONS["logprobs"],
        "logprobs": lambda i: OPTIONS["logprobs"],
        "one bias": lambda i: {} if i else OPTIONS["bias"],
        "penalties": lambda i: OPTIONS["penalties"],
        "one grammar": lambda i: {} if i else OPTIONS["grammar"],
        "grammar": lambda i: OPTIONS["grammar"],
        "texts": lambda i: OPTIONS["texts"],
    }
    kinds = {name: options for name, options in kinds.items() if not only or name in ("greedy", *only)}
    for count in counts:
        best: dict[str, dict[str, Any]] = {}
        for _ in range(rounds):
            for kind, options in kinds.items():
                steps, before = StepTimes(), engine.stats()
                prompts = [rng.integers(0, vocab, PROMPT).tolist() for _ in range(count)]
                with steps.watch(engine):
                    generate(engine, [(p, {"max_tokens": tokens, **options(i)}) for i, p in enumerate(prompts)])
                after, work = engine.stats(), engine.stats().work
                each = 1e3 / (after.steps - before.steps)
                by_engine = kind.split()[-1] in ("grammar", "texts")
                seconds = steps.decode() or np.diff(steps.ends).tolist()  # where steps have no phases
                entry = {
                    "step_ms": round(statistics.median(seconds) * 1e3, 4),
                    "host_ms": {
                        name: round((getattr(work, name) - getattr(before.work, name)) * each, 4)
                        for name in ("schedule", "submit", "wait", "output")
                    },
                    "replayed_ms": None if by_engine else round(replayed(runner, count, kind), 4),
                }
                old = best.get(kind)
                if old is None or entry["step_ms"] < old["step_ms"]:
                    best[kind] = entry
        for kind, entry in best.items():
            added = round(1e3 * (entry["step_ms"] - best["greedy"]["step_ms"]), 1)
            entry["added_us"] = added
            print(f"{count:4} rows, {kind:12} {entry}", flush=True)
        found[str(count)] = best
    return found


def check(engine: Engine, compiler: Compiler, most: int, tokens: int, result: dict[str, Any]) -> bool:
    """All checks; what they found goes to `result`."""
    runner, rng = engine.runner, np.random.default_rng()
    wrong = [fault for rows in CHECKED if rows <= most for fault in check_step(runner, rows, rng)]
    result["steps_wrong"] = wrong
    print(f"steps by hand: {len(wrong)} faults", *wrong[:8], sep="\n", flush=True)
    late = {
        f"{rows} rows, {'halves' if halves else 'whole'}": check_order(runner, rows, 200, rng, halves)
        for rows in (1, 8, most)
        for halves in (False, True)
    }
    result["rows_with_another_steps_mask"] = late
    print("rows with another step's mask:", late, flush=True)
    wrong, compared = check_requests(engine, compiler, 4, most, tokens // 2)
    result["requests_compared"], result["requests_wrong"] = compared, wrong
    print(f"{compared} requests: {len(wrong)} faults", *wrong[:8], sep="\n", flush=True)
    return not (result["steps_wrong"] or any(late.values()) or wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--cut", metavar="MODEL:TOKENS", help="write the first so many tokens of a tokenizer")
    parser.add_argument("--tokenizer", type=Path, required=True, help="with as many tokens as the model has")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--quant", default="bf16")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--kv", type=int, default=8192, help="MiB of KV cache")
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--kinds", default="", help="of those that are timed, beside greedy; default: all")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.cut:
        model, _, tokens = given.cut.partition(":")
        document, ends = document_of(model, int(tokens) if tokens else None)
        given.tokenizer.write_text(json.dumps({"document": document, "ends": ends}))
        return 0
    if not (given.folder.is_file() or any(given.folder.glob("*.json"))):
        random_checkpoint.write(given.folder, facts(given.model), given.layers)
    runner = load(given.folder, given)
    read = json.loads(given.tokenizer.read_text())
    compiler = Compiler(lambda: tokenizer_of(read["document"], read["ends"]))
    compiler.prepare()
    engine = Engine(runner, compiler)
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device = subprocess.run(smi, capture_output=True, text=True, check=False).stdout if given.backend == "cuda" else ""
    result: dict[str, Any] = {
        "what": "rows that want more than a greedy token",
        "commit": given.commit,
        "date": time.strftime("%Y-%m-%d"),
        "device": device.strip(),
        "model": f"{given.model} {given.quant}, random weights",
        "vocabulary": runner.config.shape.vocab_size,
        "tokens_each": given.tokens,
    }
    result["passed"] = given.no_check or check(engine, compiler, given.max_seqs, given.tokens, result)
    counts, kinds = [int(n) for n in given.rows.split(",")], [kind for kind in given.kinds.split(",") if kind]
    result["steps"] = costs(engine, counts, given.tokens, given.rounds, kinds)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print("passed" if result["passed"] else "FAILED")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
