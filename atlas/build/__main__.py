"""Compiles a kernel pack for a checkpoint: python -m atlas.build MODEL --hw H --quant Q

MODEL is a model directory, a config.json, a GGUF file, a catalogue name, or a model of kernels/models;
of weights only headers are read. The pack goes to the cache, where the server finds it, unless -o or --wheel says
otherwise. It runs on any machine with that hardware, whichever machine compiled it.

    python -m atlas.build tune ...      measure tuning knobs on a device; see its --help
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from atlas.build import compile as compiler
from atlas.build import pack, wheel
from atlas.build.checkpoint_target import checkpoint_target, configuration, stored_formats
from atlas.cli import Parser
from atlas.errors import AtlasError, BuildError, ConfigError
from atlas.targets.tree import kernels_root


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m atlas.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="what to compile for")
    parser.add_argument("--hw", required=True, help="hardware directory of the kernel tree, e.g. h200")
    parser.add_argument("--quant", required=True, help="quantisation recipe, e.g. bf16")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"write the pack here ({pack.SUFFIX})")
    parser.add_argument("--wheel", type=Path, metavar="FOLDER", help="write a wheel with the pack into this folder")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="kernels compiled at a time (default: %(default)s, the cores)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; errors are printed, not raised."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["tune"]:
            return int(importlib.import_module("atlas.build.tune").main(given[1:]) or 0)
        build(_parser().parse_args(given))
    except AtlasError as error:
        print(f"atlas: {error}", file=sys.stderr)
        return 1
    return 0


def build(arguments: argparse.Namespace) -> None:
    """Compile one target and write its pack. Raises AtlasError."""
    if arguments.jobs < 1:
        raise ConfigError("--jobs", str(arguments.jobs), "an integer of at least 1")
    root = kernels_root()
    config, name, files = configuration(arguments.model, root)
    target = checkpoint_target(root, config, name, arguments.hw, arguments.quant)  # refuses what cannot be
    if files is not None:
        target = dataclasses.replace(target, stored=stored_formats(files, arguments.quant))
    output = arguments.output
    cached = output is None and arguments.wheel is None
    folder = _cache_folder() if cached else None  # before compiling: a pack without a place would be lost
    # No variables: a pack must not depend on what the environment happens to ask of an installation.
    manifest, blob = compiler.build(root, [target], arguments.jobs, lambda text: print(f"atlas: {text}"), {})
    data = pack.to_bytes(manifest, blob)
    kernel_set = manifest.sets[0]
    if folder is not None:
        output = folder / pack.cache_name(kernel_set)
    if output is not None:
        pack.write(output, data)
        # A GPU serves bf16 when no quant is asked for (atlas/runtime/kernel_set.py).
        quant = "" if kernel_set.quant == "bf16" else f" --quant {kernel_set.quant}"
        use = f"python -m atlas.serve MODEL{quant}"
        use = f"the server finds it there: {use}" if cached else f"{use} --kernel-pack {output}"
        print(f"atlas: wrote {output} ({len(data)} bytes, {kernel_set.arch}): {use}")
    if arguments.wheel is not None:
        path = wheel.write(arguments.wheel, data, kernel_set)
        print(f"atlas: wrote {path}: pip install it where the server runs")


def _cache_folder() -> Path:
    from atlas.runtime.kernel_sources import cache_folder

    folder = cache_folder()
    if folder is None:
        raise BuildError("cache", "cannot be used; the warning says why", "a folder of your own", "or use -o FILE")
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
