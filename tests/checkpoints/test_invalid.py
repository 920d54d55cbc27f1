"""Every invalid checkpoint is refused by the server at start: soon, in little memory, and by name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoints.cases import expected, params, path

SECONDS, MEMORY = 30, 1 << 30


@pytest.mark.parametrize("name", params("invalid"))
def test_is_refused(name: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = tmp_path / "output"
    with output.open("wb") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "atlas.serve", str(path("invalid", name)), "--port", str(port)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            start_new_session=True,
        )
    deadline = time.monotonic() + SECONDS
    while True:
        # wait4 gives the peak of the server and of every process it waited for.
        pid, status, usage = os.wait4(server.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            os.killpg(server.pid, signal.SIGKILL)
            os.wait4(server.pid, 0)
            pytest.fail(f"still running after {SECONDS} s: {output.read_text()[-2000:]}")
        time.sleep(0.05)
    server.returncode = os.waitstatus_to_exitcode(status)
    text = output.read_text()
    assert server.returncode > 0, f"exit code {server.returncode}: {text}"
    assert usage.ru_maxrss * 1024 <= MEMORY
    assert "Traceback" not in text, text
    names = expected()["invalid"][name]["error_names_any_of"]
    assert any(word in text for word in names), f"none of {names} in: {text}"
