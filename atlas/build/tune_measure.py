"""The device side of tuning: checks every variant of a kernel, then times it.

A variant runs in a program of many identical launches, replayed as a graph where the backend has graphs, so that
launches follow one another as in a server's step and the host waits twice per measurement. Operands that come from
memory in a real step (weights, KV blocks) have so many copies that the L2 cache cannot hold them, and launches take
turns over the copies.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atlas.build import manifest, tune_bench
from atlas.build.kernel_file import ROW_MAJOR
from atlas.build.manifest import KernelEntry
from atlas.build.tune import CASES, key_of
from atlas.build.tune_bench import Bench
from atlas.build.tune_inputs import CONTEXT
from atlas.debug.compare import error_ratio
from atlas.errors import AtlasError, BuildError, DeviceError
from atlas.ops import OPS
from atlas.ops.op import EXACT
from atlas.runtime import core, memory_plan
from atlas.runtime.backend import Array, Backend, BoundProgram
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL, StepBlock, offsets
from atlas.weights.layouts import LAYOUTS
from atlas.weights.quantized import BlockArray

REPEATS = 5
SECONDS = 0.006
"""Length of one measurement."""
MARGIN = 0.98
"""A winner must be below this times the untuned score: the rest is noise."""


def measure(folder: Path, out: Path, device: int) -> None:
    """Check and time every variant that `tune --prepare` left in `folder`; write the result to `out`.

    The result is written after every kernel, so that an interrupted run leaves what it has.

    Raises:
        BuildError: the folder is damaged, or a variant is wrong (after the result is written).
    """
    document = json.loads((folder / CASES).read_text())
    known, images = manifest.from_json(
        (folder / "manifest.json").read_text(), (folder / "images.bin").read_bytes(), str(folder)
    )
    entries = {kernel.name: kernel for kernel_set in known.sets for kernel in kernel_set.kernels}
    backend = core.cuda_backend(images, device)
    result = run_cases(backend, document, entries, out)
    wrong = [f"{case['kernel']} {v['knobs']}: {v['error']}" for case in result["cases"] for v in case["wrong"]]
    wrong += result["failed"]
    if wrong:
        raise BuildError("tune", f"{len(wrong)} variants are wrong: {'; '.join(wrong[:5])}", fix=f"see {out}")


def run_cases(
    backend: Backend, document: Mapping[str, Any], entries: Mapping[str, KernelEntry], out: Path
) -> dict[str, Any]:
    """Measure all cases of a cases.json on `backend`. `entries`: variant name -> kernel."""
    result: dict[str, Any] = {
        "what": "tuning",
        "target": document["target"],
        "device": backend.describe(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": document["commit"],
        "context": CONTEXT,
        "cases": [],
        "failed": [],
    }
    started = time.perf_counter()
    benches = []
    for case in document["cases"]:
        layouts = entries[case["variants"][0]["entry"]].layouts
        phase = PHASE_PREFILL if case["phase"] == "prefill" else PHASE_DECODE
        scratch = {v.symbol: v.scratch for c in case["variants"] for v in entries[c["entry"]].variants if v.scratch}
        benches.append(tune_bench.plan(key_of(case), max(map(int, case["rows"])), layouts, phase, scratch))
    backend.allocate(max(bench.plan.total for bench in benches))
    for case, bench in zip(document["cases"], benches, strict=True):
        begun = time.perf_counter()
        try:
            weights = {int(count): weight for count, weight in case["rows"].items()}
            done = _case(backend, case, bench, entries, sorted(weights), weights)
        except BuildError as error:
            # The other kernels' figures are worth having; the command fails at the end.
            result["failed"].append(str(error))
            print(error, flush=True)
            continue
        finally:
            bench.arrays, bench.inout = {}, {}
            result["seconds"] = round(time.perf_counter() - started, 1)
            out.write_text(json.dumps(result, indent=1))
        result["cases"].append(done)
        out.write_text(json.dumps(result, indent=1))
        best, untuned = done["winner"], done["untuned"]
        print(
            f"{case['kernel']}: {len(done['variants'])} variants, {len(done['wrong'])} wrong, "
            f"score {best['score']:.3f} {best['knobs']}, us {best['us']} (untuned {untuned['us']}), "
            f"{time.perf_counter() - begun:.1f} s",
            flush=True,
        )
    return result


def _case(
    backend: Backend,
    case: Mapping[str, Any],
    bench: Bench,
    entries: Mapping[str, KernelEntry],
    rows: list[int],
    weights: Mapping[int, float],
) -> dict[str, Any]:
    """Check and time one kernel's variants; the first is the untuned choice."""
    tune_bench.fill(backend, bench, rows[-1])
    begin, end = bench.plan.regions[memory_plan.SCRATCH]
    if end > begin:
        backend.fill(begin, 0, end - begin)
    memory = backend.staging(offsets(bench.limits)[1])
    block = StepBlock(memory, bench.limits)
    bits: dict[str, Array] = {}
    good: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    handles: dict[str, int] = {}
    launches = len(bench.programs.forward.launches)
    for variant in case["variants"]:
        entry = entries[variant["entry"]]
        kernels = {bench.key.name(): entry}
        record = {"knobs": variant["knobs"], "estimate": variant["estimate"], "entry": variant["entry"]}
        try:
            handle = backend.load(
                BoundProgram(bench.programs.forward, bench.programs.buffers, bench.plan, bench.limits, kernels)
            )
        except AtlasError as refusal:  # this device cannot launch it
            wrong.append({**record, "error": str(refusal)})
            continue
        handles[variant["entry"]] = handle
        try:
            error, same, worst = _check(backend, bench, block, memory, handle, rows, bits)
            if not error and case["same_bits"] and not same:
                error = "its bits differ from the first variant's"
            record |= {"same_bits": same, "error_over_tolerance": round(worst, 4)}
            if error:
                wrong.append({**record, "error": error})
                continue
            record["us"] = {}
            for count in rows:
                backend.capture(handle, bench.phase, count)  # whole passes are replayed, as a server's steps are
                tune_bench.begin(backend, bench, block, memory, count)
                record["us"][str(count)] = round(_time(backend, handle, launches), 3)
        except DeviceError as fault:  # nothing works on the device after it
            raise DeviceError(f"tune {case['kernel']} with {variant['knobs']}", str(fault)) from None
        good.append(record)
    if not good or good[0]["entry"] != case["variants"][0]["entry"]:
        raise BuildError(f"tune {case['kernel']}", f"the untuned variant is wrong: {wrong[0]['error']}")
    base = good[0]["us"]
    for record in good:
        relative = {count: record["us"][str(count)] / base[str(count)] for count in rows}
        record["score"] = round(sum(weights[count] * relative[count] for count in rows), 4)
    best = min(good, key=lambda record: record["score"])
    # The first variant again, last: how much the device changed meanwhile.
    tune_bench.begin(backend, bench, block, memory, rows[0])
    again = _time(backend, handles[good[0]["entry"]], launches)
    return {
        **{name: case[name] for name in ("kernel", "phase", "max_rows", "op", "dtypes", "constants", "untuned_from")},
        "copies": bench.copies,
        "drift": round(again / base[str(rows[0])], 3),
        "untuned": good[0],
        "winner": best if best["score"] < MARGIN else good[0],
        "variants": good,
        "wrong": wrong,
    }


def _check(
    backend: Backend,
    bench: Bench,
    block: StepBlock,
    memory: memoryview,
    handle: int,
    rows: list[int],
    bits: dict[str, Array],
) -> tuple[str, bool, float]:
    """Run once per number of rows on poisoned outputs.

    Returns what is wrong (empty: nothing), whether the bits are the first variant's, and the largest
    error over the tolerance. `bits` keeps the first variant's outputs, and gets them from it.
    """
    contract, dtypes = OPS[bench.key.op], dict(bench.key.dtypes)
    outs = [operand.name for operand in contract.operands if operand.mode == "out"]
    most: dict[str, Any] = {}
    same, worst = True, 0.0
    for count in sorted(rows, reverse=True):
        tune_bench.begin(backend, bench, block, memory, count)
        for name in outs:
            backend.fill(bench.plan.offsets[f"{name}.0"], tune_bench.POISON, bench.physical[f"{name}.0"])
        for name, values in bench.inout.items():
            backend.write(bench.plan.offsets[f"{name}.0"], values)
        backend.run(handle, 0, 1)
        for name in outs:
            actual = _rows(backend, bench, name, dtypes[name], count)
            raw = _bytes(actual)
            # The spare rows after those that count must stay as they are; in other layouts they share tiles.
            if name not in bench.layouts and not (raw[count:] == tune_bench.POISON).all():
                return f"{name}: rows beyond {count} were written", False, math.inf
            if name in most:
                if not np.array_equal(raw[:count], _bytes(most[name])[:count]):
                    return f"{name}: a row at {count} rows has other bits than at {rows[-1]}", False, math.inf
                continue
            most[name] = actual
            if name in bits and np.array_equal(raw[:count], bits[name]):
                continue  # the first variant's bits, which were compared with the reference
            same = same and name not in bits
            bits.setdefault(name, raw[:count])
            tolerance = contract.bound(dtypes[name], dtypes) if dtypes[name] in contract.tolerance else EXACT
            found, expected = (array[:count].astype(np.float64) for array in (actual, bench.arrays[name]))
            worst = max(worst, error_ratio(found, expected, tolerance))
            if worst > 1.0:
                return f"{name}: {worst:.3g} times its tolerance from the reference", False, worst
    return "", same, worst


def _rows(backend: Backend, bench: Bench, name: str, dtype: str, count: int) -> Any:
    """The first `count` rows of an output, and the spare ones."""
    raw = np.empty(bench.physical[f"{name}.0"], np.uint8)
    backend.read(bench.plan.offsets[f"{name}.0"], raw)
    shape = bench.programs.buffers[f"{name}.0"].extents(bench.limits.symbols())
    return LAYOUTS[bench.layouts.get(name, ROW_MAJOR)].unpack(raw, shape, dtype)[: count + tune_bench.SPARE]


def _bytes(array: Any) -> Any:
    if isinstance(array, BlockArray):
        return array.raw
    return array.reshape(len(array), -1).view(np.uint8)


def _time(backend: Backend, handle: int, launches: int) -> float:
    """Microseconds per launch: the median of REPEATS measurements of about SECONDS each."""

    begin = 0

    def once(passes: int, count: int) -> float:
        """Goes on where the last one ended: a short measurement must not find its operands in the cache."""
        nonlocal begin
        if begin + count > launches:
            begin = 0
        backend.synchronize()
        started = time.perf_counter()
        for _ in range(passes):
            backend.run(handle, begin, begin + count)
        backend.synchronize()
        begin += count
        return (time.perf_counter() - started) / (passes * count)

    once(1, 1)
    guess = once(1, min(4, launches))
    if guess * 16 < SECONDS:  # so quick that the wait would show
        guess = once(1, min(64, launches))
    passes = max(1, int(SECONDS / (guess * launches)))
    # A slow kernel takes fewer launches than a whole program.
    count = launches if passes > 1 else max(min(2, launches), min(launches, int(SECONDS / guess)))
    once(passes, count)
    return statistics.median(once(passes, count) for _ in range(REPEATS)) * 1e6
