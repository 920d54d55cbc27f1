"""Lines of the log, for people and for machines."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from atlas import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the root logger writes; afterwards it is as before."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:], root.level = handlers, level


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_has_what_was_said(stream: io.StringIO) -> None:
    logs.configure("info", "json", "api", stream)
    logging.getLogger("a.b").warning("%d things\nand \ud800 %s", 3, object, extra={"fields": {"n": 1, "x": object()}})
    logging.getLogger("a.b").debug("not this")
    (line,) = lines(stream)
    assert line["message"].startswith("3 things\nand \ud800 <class")
    assert (line["level"], line["logger"], line["process"], line["n"]) == ("warning", "a.b", "api", 1)
    assert "request_id" not in line and "exception" not in line


def test_an_exception_stays_on_its_line(stream: io.StringIO) -> None:
    logs.configure("info", "json", "engine", stream)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("a").exception("it broke")
    (line,) = lines(stream)
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("ValueError: no")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_lines_of_a_request_have_its_id(stream: io.StringIO, log_format: str) -> None:
    logs.configure("info", log_format, "api", stream)
    token = logs.request_id.set("req_1")
    logging.getLogger("a").info("inside")
    logs.request_id.reset(token)
    logging.getLogger("a").info("outside")
    inside, outside = stream.getvalue().splitlines()
    assert "req_1" in inside and "req_1" not in outside


def test_configured_twice_it_says_things_once(stream: io.StringIO) -> None:
    logs.configure("info", "text", "api", stream)
    logs.configure("info", "text", "api", stream)
    logging.getLogger("a").info("once")
    assert stream.getvalue().count("once") == 1


def test_the_engine_process_logs_as_it_is_told() -> None:
    """It cannot connect, so all that it does is set up its log, and fail."""
    code = (
        "import logging, sys; sys.argv = ['engine', '--socket', '/nowhere']\n"
        "from atlas.engine.__main__ import main\n"
        "try: main()\n"
        "except OSError: logging.getLogger('x').info('told')\n"
    )
    environment = {**os.environ, **logs.environment("json")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert json.loads(result.stderr)["process"] == "engine", result.stderr
