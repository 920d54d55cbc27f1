"""Quantises a model: python -m atlas.quantize MODEL --format F --output DIR

MODEL is a model directory, a GGUF file, a catalogue name or a Hugging Face id. DIR becomes a checkpoint in the layout
that --layout names, which transformers, vLLM and Atlas read, with tokenizer and configuration, and with
quantization_report.json: the error of every tensor. Head, embeddings, norms and routers are kept.
docs/quantization.md says what each format costs.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from atlas.cli import Parser, show
from atlas.errors import AtlasError, ConfigError
from atlas.progress import Bar
from atlas.quantize import layouts
from atlas.quantize.job import REPORT, Options, run
from atlas.weights import open_checkpoint
from atlas.weights.fetch import resolve_model


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m atlas.quantize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    accepted = "; ".join(f"{format}: {', '.join(names)}" for format, names in layouts.LAYOUTS.items())
    groups = "; ".join(f"{format}: {', '.join(names)}" for format, names in layouts.GROUPS.items())
    add("model", metavar="MODEL", help="what to quantise")
    add("--format", required=True, choices=list(layouts.LAYOUTS), help="format of the matrices inside layers")
    add("--output", required=True, type=Path, metavar="DIR", help="folder to write, which must not exist yet")
    add("--layout", help=f"how they are stored, the first by default ({accepted})")
    add(
        "--group",
        help=f"weights that share a scale ({groups}); of int4 by default the largest that divides every k",
    )
    add("--zero-point", action="store_true", help="int4: an integer zero point per group (always in layout awq)")
    add("--calibration", type=Path, metavar="FILE", help="text like what the model will see: for int4-awq and modelopt")
    add("--calibration-tokens", type=int, default=4096, metavar="N", help="how much of it is run (4096)")
    add("--ignore", action="append", default=[], metavar="PATTERN", help="modules to keep, as *.layers.0.*; repeatable")
    add("--shard-size", type=float, default=5.0, metavar="GB", help="largest file, in 1e9 bytes (5)")
    add("--force", action="store_true", help="replace a checkpoint that DIR holds")
    add("--offline", action="store_true", help="fetch nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; errors are printed, not raised."""
    logging.basicConfig(format="atlas: %(message)s", level=logging.WARNING)
    bar = Bar(lines=True)
    try:
        arguments = _parser().parse_args(argv)
        options = _options(arguments)
        with open_checkpoint(resolve_model(arguments.model, offline=arguments.offline)) as checkpoint:
            report = run(checkpoint, arguments.output, options, bar)
        bar.close()
        show(report.table())
        summary = report.document()["summary"]
        size = f"{summary['quantised_weights']} weights, {summary['bits_per_weight']:.2f} bits each"
        show(f"{size}; kept: {_kept(report.kept)}")
        show(f"wrote {arguments.output}; errors of all tensors: {arguments.output / REPORT}")
    except (AtlasError, OSError) as error:
        bar.close()
        print(f"atlas: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        bar.close()
        print("atlas: interrupted; nothing is left behind", file=sys.stderr)
        return 130
    return 0


def _options(arguments: argparse.Namespace) -> Options:
    if arguments.calibration_tokens < 1:
        raise ConfigError("--calibration-tokens", str(arguments.calibration_tokens), "an integer of at least 1")
    if not arguments.shard_size > 0:
        raise ConfigError("--shard-size", str(arguments.shard_size), "a number above 0, in 1e9 bytes")
    return Options(
        format=arguments.format,
        layout=arguments.layout,
        group=arguments.group,
        zero_point=arguments.zero_point,
        calibration=None if arguments.calibration is None else _text(arguments.calibration),
        calibration_tokens=arguments.calibration_tokens,
        ignore=tuple(arguments.ignore),
        shard_bytes=int(arguments.shard_size * 1e9),
        force=arguments.force,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--calibration", f"{path} cannot be read ({error})", "a text file in UTF-8") from None


def _kept(kept: Mapping[str, str]) -> str:
    names = sorted(kept)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


if __name__ == "__main__":
    raise SystemExit(main())
