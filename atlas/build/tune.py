"""Measures tuning knobs on a device and stores the winners: python -m atlas.build tune --hw H --model M --quant Q

Every legal choice of every kernel of the target that has choices is compiled, checked against the NumPy
reference and timed. The winners, with their figures, go to kernels/<hw>/<model>/<quant>/tuning.toml, and
builds use them. Where the device has no compiler, the three parts run apart:

    tune --hw H --model M --quant Q --prepare FOLDER     compile; needs no device
    tune --measure FOLDER --out RESULT.json              measure; needs neither compiler nor kernel tree
    tune --apply RESULT.json                             write tuning.toml

A variant serves a range of rows, so the winner has the lowest sum, over rows, of weight x time relative to the
untuned choice (atlas/build/cost_model.py has the weights).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas.build import compile as compiler
from atlas.build import cost_model, kernel_file, knobs
from atlas.build.manifest import KernelEntry, KernelSet, Manifest
from atlas.cache import write_atomic
from atlas.errors import AtlasError, BuildError
from atlas.runtime.program import KernelKey
from atlas.targets import target as targets
from atlas.targets.target import Target
from atlas.targets.tree import kernels_root

CASES = "cases.json"


def main(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m atlas.build tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--hw", help="hardware directory, e.g. h200")
    parser.add_argument("--model", help="model of kernels/models")
    parser.add_argument("--quant", help="quantisation recipe, e.g. bf16")
    parser.add_argument("--ops", default="", help="comma list of ops to tune; default: all that have choices")
    parser.add_argument(
        "--arch", help="compile for this architecture instead of the hardware's (a check, not a tuning)"
    )
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="only compile, into FOLDER")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="only measure what FOLDER holds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --measure writes its result (JSON)")
    parser.add_argument("--apply", type=Path, metavar="FILE", help="only write tuning.toml from a result")
    parser.add_argument("--device", type=int, default=0, help="CUDA device index (default: 0)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="kernels compiled at a time (default: %(default)s, the cores)",
    )
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments)
    except AtlasError as error:
        print(f"atlas: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.measure:
        if not arguments.out:
            raise BuildError("--measure", "no --out", "--out FILE for the result")
        _measure(arguments.measure, arguments.out, arguments.device)
        return 0
    root = kernels_root()
    if arguments.apply:
        print(f"atlas: wrote {apply(root, _read(arguments.apply))}")
        return 0
    target = _target(root, arguments)
    ops = tuple(op for op in arguments.ops.split(",") if op)
    if arguments.prepare:
        print(f"atlas: {prepare(root, target, arguments.prepare, arguments.jobs, ops, arguments.arch)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="atlas-tune-") as folder:
        print(f"atlas: {prepare(root, target, Path(folder), arguments.jobs, ops, arguments.arch)}")
        result = arguments.out or Path(folder) / "result.json"
        _measure(Path(folder), result, arguments.device)
        print(f"atlas: wrote {apply(root, _read(result))}")
    return 0


def _target(root: Path, arguments: argparse.Namespace) -> Target:
    for flag in ("hw", "model", "quant"):
        if not getattr(arguments, flag):
            raise BuildError(f"--{flag}", "missing", "a name: tuning is for one target")
    chosen = targets.select(
        root,
        {
            "ATLAS_TARGET_HW": arguments.hw,
            "ATLAS_TARGET_MODEL": arguments.model,
            "ATLAS_TARGET_QUANT": arguments.quant,
        },
    ).targets
    found = [target for target in chosen if target.hardware.kind == "cuda"]
    if len(found) != 1:
        names = ", ".join(target.name for target in found) or "none"
        raise BuildError("--hw, --model, --quant", f"GPU targets: {names}", "exactly one")
    return found[0]


def _measure(folder: Path, out: Path, device: int) -> None:
    from atlas.build import tune_measure  # needs NumPy and the extension; compiling does not

    tune_measure.measure(folder, out, device)


def prepare(
    root: Path, target: Target, folder: Path, workers: int, ops: Sequence[str] = (), arch: str | None = None
) -> str:
    """Compile every legal variant of the target's tunable kernels into `folder`; returns a summary.

    Variants that fail a check (spills above all) are left out.
    """
    from atlas.build import cuda, kernel_job

    arch = arch or target.hardware.arch
    blob = compiler.ImageBlob()
    entries: list[KernelEntry] = []
    cases: list[dict[str, Any]] = []
    dropped = 0
    with kernel_job.Compiler(workers) as running:
        planned = []
        for key, phases in compiler.closure(target).items():
            if ops and key.op not in ops:
                continue
            for own in kernel_job.plan(root, target, key, arch, phases):
                declared, max_rows = own.declared, own.max_rows
                if not declared.choices:
                    continue
                untuned = knobs.untuned(declared, key, target.hardware, max_rows)
                values = knobs.variants(declared, key, target.hardware, max_rows)
                values = [untuned.values, *(v for v in values if v != untuned.values)]
                jobs = [
                    kernel_job.plan_variant(root, target, key, arch, declared, max_rows, knobs.Chosen(v, "variant"))
                    for v in values
                ]
                for job in jobs:
                    running.start(job)
                planned.append((key, declared, max_rows, untuned, jobs))
        for key, declared, max_rows, untuned, jobs in planned:
            variants: list[dict[str, Any]] = []
            for job in jobs:
                compiled = running.result(job)
                name = "__".join([key.name(), *knobs.variant_words(declared.phase, max_rows), f"v{len(variants)}"])
                try:
                    entries.append(kernel_job.entry([(job, compiled)], blob.add, "cubin", name))
                except BuildError:
                    if job.chosen.values == untuned.values:
                        raise
                    dropped += 1
                    continue
                variants.append({"entry": name, "knobs": job.chosen.values, "estimate": None})
                if declared.cost:
                    known = knobs.names(key, target.hardware, max_rows)
                    (estimate,) = cost_model.relative(declared, known, target.hardware, [job.chosen.values])
                    variants[-1]["estimate"] = round(estimate, 4)
            cases.append(
                {
                    "kernel": key.name(),
                    "phase": declared.phase,
                    "max_rows": max_rows,
                    "rows": {str(n): w for n, w in cost_model.rows_of(declared.phase, max_rows).items()},
                    "op": key.op,
                    "dtypes": [list(pair) for pair in key.dtypes],
                    "constants": [list(pair) for pair in key.constants],
                    "declared": declared.knobs(knobs.names(key, target.hardware, max_rows)),
                    "untuned_from": untuned.source,
                    "same_bits": declared.same_bits,
                    "variants": variants,
                }
            )
    if not cases:
        raise BuildError(target.name, "no kernel has [knobs.choices]", "a target with something to choose")
    hardware = target.hardware
    kernel_set = KernelSet(
        hardware.name, "cuda", target.model, target.quant, "*", arch, hardware.compute_capability, tuple(entries)
    )
    version = cuda.compiler_version()
    compiler.write(folder, Manifest((kernel_set,), tuple(blob.images), version), bytes(blob.data))
    document = {
        "target": {"hw": hardware.name, "model": target.model, "quant": target.quant, "arch": arch},
        "commit": _commit(root),
        "cases": cases,
    }
    (folder / CASES).write_text(json.dumps(document, indent=1))
    return f"{len(entries)} variants of {len(cases)} kernels for {arch} in {folder}; {dropped} failed a check"


def _commit(root: Path) -> str:
    """The checkout's commit, with + if files differ from it; "unknown" outside git."""
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
        return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def key_of(case: dict[str, Any]) -> KernelKey:
    """The kernel key that a case of cases.json stands for."""
    return KernelKey(
        case["op"], tuple((a, b) for a, b in case["dtypes"]), tuple((name, value) for name, value in case["constants"])
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if document["what"] != "tuning":
            raise ValueError(f"what is {document['what']!r}")
        return document
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(str(path), f"is no tuning result ({error})", "a file that tune --measure wrote") from None


def apply(root: Path, result: dict[str, Any]) -> Path:
    """Write the winners of a result into their target's tuning.toml; other kernels' tables stay.

    Raises:
        BuildError: the result was measured for another architecture than the hardware's, or the tree's
            kernels no longer have the choices.
    """
    of = result["target"]
    name = f"{of['hw']}/{of['model']}/{of['quant']}"
    wanted = {"ATLAS_TARGET_HW": of["hw"], "ATLAS_TARGET_MODEL": of["model"], "ATLAS_TARGET_QUANT": of["quant"]}
    target = next(t for t in targets.select(root, wanted).targets if t.name == name)
    if of["arch"] != target.hardware.arch:
        raise BuildError(
            f"result for {name}", f"was measured with {of['arch']} code", f"{target.hardware.arch}: time on {of['hw']}"
        )
    file = target.hardware.directory / target.model / target.quant / "tuning.toml"
    blocks = _blocks(file.read_text()) if file.exists() else {}
    for case in result["cases"]:
        key = key_of(case)
        phase, max_rows = case["phase"], case["max_rows"]
        path = targets.resolve(target, key.op, phase or "decode", dict(key.dtypes), dict(key.constants))
        declared = kernel_file.declaration(path)
        winner = case["winner"]
        reason: str | None = "other knobs than the kernel has"
        if set(winner["knobs"]) == set(declared.stated_knobs):
            reason = knobs.illegal(declared, key, target.hardware, winner["knobs"], max_rows)
        if reason:
            raise BuildError(f"result for {name}", f"{key.name()}: {reason}", fix="tune again")
        header = "[" + ".".join([key.op, key.name(), *knobs.variant_words(phase, max_rows)]) + "]"
        blocks[header] = _block(header, case, result)
    text = (
        "# Written by `python -m atlas.build tune`; the nearest tuning.toml wins, per kernel.\n"
        "# Microseconds per launch; untuned: what the cost model or the declaration would choose.\n\n"
    ) + "\n".join(blocks[header] for header in sorted(blocks))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text.encode(), 0o644)
    return file


def _block(header: str, case: dict[str, Any], result: dict[str, Any]) -> str:
    winner, untuned = case["winner"], case["untuned"]
    rows = list(winner["us"])
    figures = [
        f"# {result['device']}, {result['date']}, commit {result['commit']}",
        f"# rows      {' '.join(f'{r:>8}' for r in rows)}   score",
        f"# tuned     {_figures(winner, rows)}   {winner['score']:.3f}",
        f"# untuned   {_figures(untuned, rows)}   {untuned['score']:.3f}",
    ]
    return "\n".join([header, *figures, *(f"{k} = {v}" for k, v in sorted(winner["knobs"].items()))]) + "\n"


def _figures(variant: dict[str, Any], rows: Sequence[str]) -> str:
    return " ".join(f"{variant['us'][r]:>8.2f}" for r in rows)


def _blocks(text: str) -> dict[str, str]:
    """Tables of a tuning.toml as text, by header."""
    parts = re.split(r"(?m)^(?=\[)", text)
    return {part.split("\n", 1)[0].strip(): part.rstrip() + "\n" for part in parts if part.startswith("[")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
