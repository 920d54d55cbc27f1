"""Whatever a client sends: no 5xx, no answer outside the document, nothing accepted that the document excludes.

Schemathesis makes requests from the OpenAPI document: every boundary of every field, valid and invalid, and then
random ones. The document is the server's own, with answers that may have no other fields than theirs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serve_harness import RunningServer, Start, eventually
from test_openapi import closed

LEFT_OUT = (
    # What fields say together is not in the document: min_tokens up to max_tokens, prompt or messages.
    "positive_data_acceptance",
    # A body that is not said to be JSON is refused (415) before anybody looks for an endpoint.
    "unsupported_method",
)


SEEDS: dict[str, Any] = {}
"""Not those for which the engine of the other tests is slow or breaks down."""


def fuzz(server: RunningServer, folder: Path, document: Any, *flags: str) -> subprocess.CompletedProcess[str]:
    """`schemathesis run` on a document, against a server."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", server.url, "--no-color"]
    command += ["--checks", "all", "--exclude-checks", ",".join(LEFT_OUT), "--continue-on-failure", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1500)


def own_document(server: RunningServer) -> dict[str, Any]:
    return closed(server.http.get("/openapi.json").json())


def is_unharmed(server: RunningServer) -> None:
    """It answers, nothing runs on, and no request ended in a fault of the server's own."""
    assert server.health() == 200
    eventually(lambda: server.http.get("/server_info").json()["engine"]["running"] == 0)
    assert "Traceback" not in server.output.read_text()


def test_requests_made_from_the_document(start: Start, tmp_path: Path) -> None:
    server = start(behaviours=SEEDS).wait_ready()
    found = fuzz(
        server, tmp_path, own_document(server), "--phases", "coverage,fuzzing", "--max-examples", "4", "--seed", "6"
    )
    assert found.returncode == 0, found.stdout[-20_000:]
    is_unharmed(server)


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flags", [(), ("--strict-fields",)])
def test_many_requests_made_from_the_document(
    start: Start, tmp_path: Path, flags: tuple[str, ...], pytestconfig: pytest.Config
) -> None:
    if "fuzz" not in str(pytestconfig.getoption("markexpr")):
        pytest.skip("takes a quarter of an hour; run with `pytest -m fuzz`")
    server = start(*flags, behaviours=SEEDS).wait_ready()
    found = fuzz(server, tmp_path, own_document(server), "--max-examples", "1000", "--max-time", "900")
    assert found.returncode == 0, found.stdout[-20_000:]
    is_unharmed(server)


@pytest.mark.parametrize(
    "change",
    [
        ("schemas", "Version", "properties", "version", "type", "integer"),
        ("schemas", "Version", "required", ["version", "name"]),
    ],
)
def test_a_wrong_answer_would_be_found(shared: RunningServer, tmp_path: Path, change: tuple[Any, ...]) -> None:
    document = own_document(shared)
    place = document["components"]
    *steps, last, value = change
    for step in steps:
        place = place[step]
    place[last] = value
    found = fuzz(shared, tmp_path, document, "--phases", "coverage", "--include-path", "/version")
    assert found.returncode == 1 and "violates schema" in found.stdout, found.stdout
