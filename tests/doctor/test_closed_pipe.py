"""A reader that goes away early (`| head`) is no error: nothing on stderr, and the exit code is the command's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DOCTOR = "import sys; from atlas.doctor import __main__ as d; from atlas.doctor.report import Result; "
DOCTOR += "d.run = lambda context: [Result('disk', 'problem', 'x' * {size}, 'buy')]; sys.exit(d.main({arguments}))"


def ended(*command: str) -> tuple[int, str]:
    """Exit code and stderr of a Python whose standard output nobody reads any more."""
    # Buffered, as for most people: then the pipe is found closed only when Python ends.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *command],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("atlas", "--version"),
        ("atlas", "--help"),
        ("atlas", "doctor", "--help"),
        ("atlas", "targets", "--json"),
        ("atlas.doctor", "--help"),
        ("atlas.targets",),
        ("atlas.targets", "--json"),
        ("atlas.targets", "--help"),
    ],
)
def test_output_that_nobody_reads(command: tuple[str, ...]) -> None:
    assert ended("-m", *command) == (0, "")


@pytest.mark.parametrize("size", [1, 1 << 20])  # fails when flushed, and already when printed
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_doctor_still_tells_by_its_exit_code(size: int, arguments: list[str]) -> None:
    assert ended("-c", DOCTOR.format(size=size, arguments=arguments)) == (1, "")


@pytest.mark.parametrize("command", [("atlas", "doctor"), ("atlas.doctor", "--json")])
def test_a_whole_check_that_nobody_reads(command: tuple[str, ...]) -> None:
    code, errors = ended("-m", *command)
    assert code in (0, 1) and "BrokenPipeError" not in errors and "Traceback" not in errors
