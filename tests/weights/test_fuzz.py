"""Half a minute of damaged checkpoints; docs/testing.md has the command for ten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SECONDS = 30


def test_damaged_checkpoints_end_in_an_error_that_says_where() -> None:
    """In a process of its own, which a crash may end and whose memory is limited. It prints seed and case."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.weights.fuzz", "--seconds", str(SECONDS)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=10 * SECONDS,
    )
    print(result.stdout)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stderr[-4000:]}\n{result.stdout[-500:]}"
