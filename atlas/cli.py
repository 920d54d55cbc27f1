"""The `atlas` command: `atlas serve`, `build`, `targets`, `bench` and `doctor`, each as `python -m atlas.<name>`.

Standard library only, so that `atlas --version` and `atlas targets` answer at once and in any install.
"""

from __future__ import annotations

import argparse
import difflib
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from atlas import __version__, installed
from atlas.errors import AtlasError, ConfigError

COMMANDS = {
    "serve": "serve a model over HTTP",
    "build": "compile a kernel pack for a model",
    "targets": "list hardware, models and quants, and what this install holds",
    "quantize": "write a quantised checkpoint",
    "bench": "measure speed and accuracy",
    "doctor": "check this install and this machine, and say what to do",
}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError on a wrong command line, for the command to report like any other error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("command line", message, fix=f"see {self.prog} --help")


def show(text: str = "", end: str = "\n") -> None:
    """Print to stdout at once. Where the reader has gone (`| head`), this and what follows goes nowhere, quietly."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        # What Python still holds must not go there either, or it complains when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usage() -> str:
    """The text of `atlas --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    ends = "`atlas COMMAND --help` lists a command's own settings."
    return "\n".join(["usage: atlas COMMAND [ARGUMENT ...]", "", *lines, "", ends])


def version() -> str:
    """The version, and the targets that are compiled in."""
    try:
        names = installed.targets()
    except AtlasError as error:
        return f"atlas {__version__} ({error})"
    return f"atlas {__version__} ({', '.join(names) if names else 'not built: run `pip install .`'})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. The exit code: the command's own, or 2 where none was named rightly."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["--version"], ["-V"]):
        show(version())
        return 0
    if given[:1] in (["--help"], ["-h"]):
        show(usage())
        return 0
    if not given:
        print(usage(), file=sys.stderr)
        return 2
    command, *rest = given
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see atlas --help"
        print(f"error: {command}: unknown command; accepted: {', '.join(COMMANDS)}; {hint}", file=sys.stderr)
        return 2
    sys.argv = [f"atlas {command}", *rest]
    # The module decides its exit code by SystemExit, exactly as under `python -m`.
    try:
        runpy.run_module(f"atlas.{command}", run_name="__main__", alter_sys=True)
    finally:
        show(end="")  # the help that argparse wrote, say
    return 0
