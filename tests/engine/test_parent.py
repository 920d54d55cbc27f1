"""The engine process does not outlive the process that started it, whatever it hangs in."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.serve.serve_harness import alive, environment, eventually

PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-m", "atlas.engine", "--socket", sys.argv[1]]).pid, flush=True)
time.sleep(60)
"""


def test_an_engine_that_hangs_ends_with_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-c", PARENT, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as parent:
            assert parent.stdout is not None
            engine = int(parent.stdout.readline())
            listener.settimeout(20)
            connection, _ = listener.accept()
            os.kill(engine, signal.SIGSTOP)
            parent.kill()
            parent.wait()
            eventually(lambda: not alive(engine), 5)
            connection.close()
