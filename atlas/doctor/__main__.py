"""`python -m atlas.doctor [MODEL]`: every check, one line each; exit code 1 if there is a problem."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

from atlas import __version__
from atlas.cli import show
from atlas.doctor import install
from atlas.doctor.report import Context, Result

Check = Callable[[Context], list[Result]]


def checks() -> list[Check]:
    """All checks, in the order they are told. Those that need NumPy are missing where it does not import."""
    basic: list[Check] = [install.python, install.packages, install.extension, install.variables]
    try:
        from atlas.doctor import kernels, machine
    except ImportError as error:
        # Bound now: Python forgets `error` when this block ends.
        found = f"checks of machine and kernels need a package: {error}"
        return [*basic, lambda context: [Result("machine", "problem", found, "see `packages` above")]]
    return [
        *basic,
        machine.device,
        machine.instruction_sets,
        machine.threads,
        machine.memory_nodes,
        machine.memory,
        machine.storage,
        kernels.kernel_sets,
        kernels.model,
    ]


def run(context: Context) -> list[Result]:
    """The results of every check. A check that breaks is itself a problem, and hides no other."""
    results: list[Result] = []
    for check in checks():
        try:
            results += check(context)
        except Exception as error:  # a doctor that dies helps nobody
            found = f"the check itself failed: {type(error).__name__}: {error}"
            results.append(Result(check.__name__, "problem", found, "report it with this output"))
    return results


def text(results: Sequence[Result]) -> str:
    """The report for people."""
    lines = [f"Atlas {__version__}"]
    width = max(len(result.check) for result in results)
    for result in results:
        lines.append(f"{result.status:<8} {result.check:<{width}}  {result.found}")
        if result.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {result.remedy}")
    problems = sum(result.status == "problem" for result in results)
    lines.append(f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem found")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The exit code: 1 if a check found a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m atlas.doctor",
        description="Check this install and this machine, and say what to do about what is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="also say which kernels MODEL would get, and why")
    parser.add_argument("--quant", help="as for serve: the quant to choose for")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda", "reference"), default="auto", help="as for serve")
    parser.add_argument("--kernel-pack", action="append", default=[], metavar="FILE", help="as for serve")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    arguments = parser.parse_args(argv)
    results = run(Context(arguments.model, arguments.quant, arguments.backend, arguments.kernel_pack))
    problems = sum(result.status == "problem" for result in results)
    if arguments.json:
        entries = [dataclasses.asdict(result) for result in results]
        show(json.dumps({"version": __version__, "problems": problems, "checks": entries}, indent=1))
    else:
        show(text(results))
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        show(end="")  # the help that argparse wrote
