"""`python -m atlas.bench prefill|decode|ladder|quant-accuracy`: measure, print a table, write JSON and a plot."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas.bench import accuracy, flags, machine, plot, roofline, speed
from atlas.bench.local import LocalTarget
from atlas.bench.remote import RemoteTarget
from atlas.cli import show
from atlas.config import OFFLINE_FIELDS, ServeConfig, flag_name, offline_config
from atlas.errors import AtlasError, ConfigError
from atlas.llm import LLM
from atlas.progress import Bar

DEFAULT_MODEL = ServeConfig().model


def main(argv: Sequence[str]) -> int:
    """The exit code: 0, 1 where a request failed, 2 for wrong settings, 130 after Ctrl-C."""
    given = flags.parser().parse_args(argv)
    if given.model is None and "url" not in given:
        given.model = DEFAULT_MODEL
    where = machine.describe()  # now: files may change while it runs
    try:
        _writable(given)
        return _accuracy(given, where) if given.command == "quant-accuracy" else _speed(given, where)
    except AtlasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


def _writable(given: argparse.Namespace) -> None:
    """Said before minutes of measuring, not after."""
    plot_file = getattr(given, "plot", None)
    if plot_file is not None and plot_file.suffix != ".svg":
        raise ConfigError("--plot", str(plot_file), "a name that ends in .svg")
    for flag, path in (("--json", given.json), ("--plot", plot_file)):
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise ConfigError(flag, f"{path} cannot be written", "a file in a folder that exists")


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """What was said of LLM's options, as values."""
    said = {name: value for name, value in vars(given).items() if name in OFFLINE_FIELDS}
    config = offline_config(given.model or DEFAULT_MODEL, said, strict=False)
    return {name: getattr(config, name) for name in said}


def _result(given: argparse.Namespace, where: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What goes into the JSON. Of files the name only: a folder says nothing to others."""
    settings = {name: value for name, value in vars(given).items() if name not in ("json", "plot", "api_key")}
    return {
        "what": f"python -m atlas.bench {given.command}",
        "settings": {name: value.name if isinstance(value, Path) else value for name, value in settings.items()},
        **where,
        **more,
    }


def _write(flag: str, path: Path | None, text: str) -> None:
    if path is not None:
        try:
            path.write_text(text)
        except OSError as error:
            raise ConfigError(flag, f"{path}: {error.strerror}") from None


def _json(result: dict[str, Any]) -> str:
    return json.dumps(_finite(result), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no number for: an interval of one block, say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


# ---- speed -----------------------------------------------------------------------------------------


def _speed(given: argparse.Namespace, where: dict[str, Any]) -> int:
    output = getattr(given, "output_tokens", 1)
    levels = getattr(given, "concurrency", [1])
    cases = speed.cases(given.command, given.prompt_tokens, output, levels, getattr(given, "requests", 1))
    options = _options(given)
    target: speed.Target
    if "url" in given:
        if options:
            flag = flag_name(next(iter(options)))
            raise ConfigError(flag, "given with --url", fix="it is the server's own setting")
        if given.model is not None:
            raise ConfigError("MODEL", f"{given.model} with --url", fix="name the server's with --served-model")
        key = given.api_key or os.environ.get("OPENAI_API_KEY", "")
        target = RemoteTarget(given.url, key, given.served_model, given.ignore_eos, given.timeout)
    else:
        options.setdefault("max_seqs", max(levels))
        options.setdefault("max_context", max(case.prompt_tokens + case.output_tokens for case in cases))
        target = LocalTarget(_load(given, options))
    bar = Bar()

    def report(result: dict[str, Any]) -> None:
        bar.close()
        show(_line(result))

    try:
        for name, value in target.description.items():
            show(f"{name.replace('_', ' ')}: {value}")
        show(_header())
        results = speed.measure(
            target,
            cases,
            repeats=given.repeats,
            warm_up=given.warm_up,
            seed=given.seed,
            threads=options.get("threads"),
            report=report,
            progress=bar,
        )
    finally:
        bar.close()
        target.close()
    _write("--json", given.json, _json(_result(given, where, target=target.description, cases=results)))
    if getattr(given, "plot", None) is not None:
        _write("--plot", given.plot, _chart(target.description, results))
    return int(any(result["failures"] for result in results))


def _load(given: argparse.Namespace, options: dict[str, Any]) -> LLM:
    try:
        return LLM(given.model, **options)
    except ConfigError as error:
        if error.where != "max_context" or "max_context" in given:
            raise
        found = f"{options['max_context']} tokens with the answer"  # not asked for: it follows from the cases
        raise ConfigError("--prompt-tokens", found, error.accepted) from None


def _header() -> str:
    names = (
        "prefill t/s",
        "decode t/s",
        "output t/s",
        "req/s",
        "TTFT p50/p99 ms",
        "inter-token p50/p99",
        "end p50/p99 ms",
    )
    widths = (12, 11, 11, 8, 17, 20, 19)
    return f"{'case':<24}" + "".join(f" {name:>{width}}" for name, width in zip(names, widths, strict=True))


def _line(result: dict[str, Any]) -> str:
    def rate(name: str) -> str:
        return f"{result[name]['median']:.1f}" if result[name] else "-"

    def pair(name: str) -> str:
        return f"{result[name]['p50']:.1f} / {result[name]['p99']:.1f}" if result[name] else "-"

    text = (
        f"{result['case']:<24} {rate('prefill_tokens_per_s'):>12} {rate('decode_tokens_per_s'):>11}"
        f" {rate('output_tokens_per_s'):>11} {rate('requests_per_s'):>8}"
        f" {pair('ttft_ms'):>17} {pair('inter_token_ms'):>20} {pair('end_to_end_ms'):>19}"
    )
    if result["failures"]:
        text += f"\n  FAILED: {result['failures']} of {result['requests']}: {'; '.join(result['errors'])}"
    if result.get("roofline"):
        text += "\n  " + roofline.sentence(result["roofline"])
    return text


def _chart(description: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    def curve(name: str, part: str) -> list[tuple[float, float]]:
        return [(result["concurrency"], result[name][part]) for result in results if result[name]]

    label = "requests at a time"
    panels = [
        plot.Panel("throughput", label, "output tokens/s", {"median": curve("output_tokens_per_s", "median")}),
        plot.Panel("time to first token", label, "ms", {p: curve("ttft_ms", p) for p in ("p50", "p99")}),
        plot.Panel("between tokens", label, "ms", {p: curve("inter_token_ms", p) for p in ("p50", "p99")}),
    ]
    caption = ", ".join(str(value) for value in description.values())
    return plot.svg(panels, f"{caption}; {machine.cpu_name()}; commit {machine.commit()}")


# ---- accuracy ----------------------------------------------------------------------------------------


def _accuracy(given: argparse.Namespace, where: dict[str, Any]) -> int:
    try:
        text = given.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--text", f"{given.text}: {error}", "a UTF-8 text file") from None
    options = _options(given)
    rows = accuracy.subjects(given.model, given.formats.split(","), given.compare)
    bar = Bar()

    def report(row: dict[str, Any]) -> None:
        bar.close()
        show(accuracy.table_line(row))

    show(accuracy.header())
    try:
        found = accuracy.measure(
            given.model,
            text,
            rows,
            window=given.window,
            stride=given.stride,
            tokens=given.tokens,
            options=options,
            report=report,
            progress=bar,
        )
    finally:
        bar.close()
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    _write("--json", given.json, _json(_result(given, where, text_sha256=sha256, **found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
